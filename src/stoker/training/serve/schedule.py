"""Which sequences compute which tokens in the next step. No torch, and the same plans for the same requests.

Sequences are admitted in the order of their arrival, as many as there are slots and blocks for. A step computes one
token of every sequence that has one left (the token step), and up to `budget` tokens of those that have more (prompts).
Where there are only token steps to be made, several may be planned at once.
Where blocks run out, the youngest sequence gives its blocks back and computes its tokens again later: the oldest always
goes on.

Prompts begin in groups while nearly all slots are taken: each pass over prompts holds up every running answer (on an
H200, 0.6B, 256 answers: 25 ms for one prompt as for sixteen, a token step 5 ms).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Sequence

from stoker.contract.frozen import frozen
from stoker.training.serve.blocks import Chain, Copy, Key, Pool, Table

GROUPS = 16  # of the slots: so many passes over prompts renew them all
PATIENCE = 16  # steps that free slots wait for more of them


class Writing:
    """A prompt and its answer so far. `computed`: how many of the tokens have keys and values in the cache."""

    def __init__(self, number: int, prompt: Iterable[int], alone: bool = False, new_tokens: int = 1 << 40) -> None:
        """`alone`: all of it is computed, whoever begins alike; `new_tokens`: at most, behind the prompt."""
        self.number, self.tokens, self.alone = number, list(prompt), alone
        self.prompt, self.computed, self.slot = len(self.tokens), 0, -1
        self.longest = self.prompt + new_tokens
        self.table: Table | None = None
        self.chain: Chain | None = None

    @property
    def left(self) -> int:
        """Tokens to compute before the next one can be written."""
        return len(self.tokens) - self.computed

    @property
    def begun(self) -> bool:
        return self.slot >= 0 or len(self.tokens) > self.prompt


@frozen
class Piece:
    """tokens[begin:end] are computed. At the last token's end a new one is written."""

    writing: Writing
    begin: int
    end: int

    @property
    def is_last(self) -> bool:
        return self.end == len(self.writing.tokens)


@frozen
class Plan:
    copies: tuple[Copy, ...]  # of blocks, before all else
    pieces: tuple[Piece, ...]
    rows: tuple[Writing, ...]  # of the token step
    left_out: tuple[Writing, ...]  # whose blocks were given back
    count: int = 1  # tokens of each of the rows, or as many as it may have yet

    @property
    def is_empty(self) -> bool:
        return not self.pieces and not self.rows


class Schedule:
    def __init__(self, slots: int, pool: Pool, budget: int) -> None:
        assert slots > 0 and budget > 0
        self.pool, self._budget = pool, budget
        self._slots = list(range(slots - 1, -1, -1))  # free ones, the lowest last: those in use stay together
        self._together, self._since = max(slots // GROUPS, 1), 0  # steps since prompts could begin
        self._count, self._root = 0, ""
        self.waiting: list[Writing] = []
        self.running: list[Writing] = []  # both in the order of arrival
        self.preemptions = self.shared_tokens = self.prompt_tokens = 0

    def add(self, prompt: Iterable[int], alone: bool = False, new_tokens: int = 1 << 40) -> Writing:
        writing = Writing(self._count, prompt, alone, new_tokens)
        self._count += 1
        self.waiting.append(writing)
        return writing

    def end(self, writing: Writing) -> None:
        """It is written, or nobody wants it any more."""
        if writing.slot < 0:
            self.waiting.remove(writing)
        else:
            self._leave(writing)

    def restart(self, root: str) -> None:
        """All tokens are computed again. `root`: what tells the cached numbers from those of before."""
        for writing in list(self.running):
            self._set_back(writing)
        self.pool.forget()
        self._root = root
        for writing in self.waiting:
            writing.chain = None

    def plan(self, admits: Callable[[Writing], bool] = lambda _: True, most: int = 1, alone: int = 0) -> Plan:
        """`admits`: whether one that waits may begin now; `most`: token steps at once; `alone`: where nobody waits."""
        rows, copies, left_out = self._token_rows()
        pieces: list[Piece] = []
        budget = self._budget
        for writing in self.running:
            if writing.left > 1 and budget:
                pieces.append(self._piece(writing, budget))
                budget -= pieces[-1].end - pieces[-1].begin
        if not left_out:  # else what was just given back would be taken by the one who gave it
            for writing in self._admitted(admits, copies, budget):
                if writing.left == 1:
                    rows.append(writing)
                elif budget:
                    pieces.append(self._piece(writing, budget))
                    budget -= pieces[-1].end - pieces[-1].begin
        most = max(most, alone) if not self.waiting else most
        count = 1 if pieces or left_out or most < 2 or not rows else self._several(rows, most)
        self._since += count
        return Plan(tuple(copies), tuple(pieces), tuple(rows), tuple(left_out), count)

    def _several(self, rows: Sequence[Writing], most: int) -> int:
        """How many steps all rows have blocks for, which they take: half as many, and again, where there are too few."""
        count = min(most, max(writing.longest - len(writing.tokens) for writing in rows))
        tables = [writing.table for writing in rows if writing.table is not None]
        while True:
            if count < 2:
                return 1
            ends = [min(len(writing.tokens) + count - 1, writing.longest) for writing in rows]
            more = sum(max(self.pool.needed(end) - len(one.blocks), 0) for one, end in zip(tables, ends, strict=True))
            if more <= self.pool.available:
                break
            count //= 2
        for table, end, writing in zip(tables, ends, rows, strict=True):
            # Behind the last token: that one has its place, maybe in a full block that others hold, too, where it is computed again.
            made = self.pool.grow(table, len(writing.tokens), end)
            assert made == [], "what is written to is a row's own already"
        return count

    def computed(self, plan: Plan) -> None:
        """The plan was carried out; before new tokens are added to its sequences. Of several token steps the first."""
        for piece in plan.pieces:
            self._advance(piece.writing, piece.end)
        for writing in plan.rows:
            self._advance(writing, writing.computed + 1)

    def followed(self, writing: Writing) -> None:
        """All its tokens but the last are computed: those that further token steps wrote were added."""
        self._advance(writing, len(writing.tokens) - 1)

    def _token_rows(self) -> tuple[list[Writing], list[Copy], list[Writing]]:
        rows: list[Writing] = []
        copies: list[Copy] = []
        left_out: list[Writing] = []
        for writing in list(self.running):
            if writing.slot < 0 or writing.left > 1:
                continue
            assert writing.table is not None
            made = self.pool.grow(writing.table, writing.computed, len(writing.tokens))
            while made is None and writing.slot >= 0:
                youngest = self.running[-1]  # never one that has its row already: those are older
                self.preemptions += 1
                left_out.append(youngest)
                self._set_back(youngest)
                if writing.slot >= 0:
                    made = self.pool.grow(writing.table, writing.computed, len(writing.tokens))
            if made is not None:
                copies += made
                rows.append(writing)
        return rows, copies, left_out

    def _admitted(self, admits: Callable[[Writing], bool], copies: list[Copy], budget: int) -> list[Writing]:
        """Those that begin now. One whose beginning is just being computed by another waits for that, and others go ahead."""
        found: list[Writing] = []
        if self._holds():
            return found
        coming = {key for writing in self.running if writing.left > 1 for key in self._to_come(writing)}
        for writing in self.waiting:
            if not self._slots:
                break
            keys = self._keys(writing)
            shared = self.pool.known(keys)
            if not admits(writing) or (len(shared) < len(keys) and keys[len(shared)] in coming):
                continue
            whole = len(shared) == len(keys)  # the last token is computed again: what follows it was not kept
            computed = len(writing.tokens) - 1 if whole else len(shared) * self.pool.size
            if len(writing.tokens) - computed > 1 and budget <= 0:
                break
            # A block for each that runs: who is admitted should not have to leave at once.
            spare = len(self.running) + (whole and self.pool.is_held(shared[-1]))
            table = self.pool.opened(shared, len(writing.tokens), spare)
            if table is None:
                break  # and no younger, smaller one instead: a large one would never begin
            made = self.pool.grow(table, computed, len(writing.tokens), again=whole)
            assert made is not None
            copies += made
            writing.table, writing.computed, writing.slot = table, computed, self._slots.pop()
            self.shared_tokens += computed
            if writing.left > 1:
                budget -= writing.left
                coming.update(self._to_come(writing))
            insort(self.running, writing, key=lambda one: one.number)
            found.append(writing)
        self.waiting = [writing for writing in self.waiting if writing.slot < 0]
        return found

    def _holds(self) -> bool:
        """Whether free slots wait: few are, more will be soon, and more sequences want one than there are."""
        free = len(self._slots)
        if 0 < free < min(self._together, len(self.waiting)) and self._since < PATIENCE:
            return True
        self._since = 0
        return False

    def _piece(self, writing: Writing, budget: int) -> Piece:
        return Piece(writing, writing.computed, min(writing.computed + budget, len(writing.tokens)))

    def _keys(self, writing: Writing) -> list[Key]:
        """Of all its blocks; the last may be partly filled."""
        chain, end = self._chain(writing), len(writing.tokens)
        return [*chain.full(writing.tokens, end - 1), chain.last(writing.tokens, end)]

    def _to_come(self, writing: Writing) -> list[Key]:
        return self._keys(writing)[writing.computed // self.pool.size :]

    def _chain(self, writing: Writing) -> Chain:
        if writing.chain is None:
            writing.chain = Chain(self.pool.size, f"{self._root} {writing.number}" if writing.alone else self._root)
        return writing.chain

    def _advance(self, writing: Writing, end: int) -> None:
        size, before = self.pool.size, writing.computed
        if end % size and before // size == end // size and before >= writing.prompt:  # within a block of the answer
            writing.computed = end
            return
        assert writing.table is not None
        chain = self._chain(writing)
        keys = chain.full(writing.tokens, end)
        for place in range(before // size, end // size):
            self.pool.name(writing.table, keys[place], (place + 1) * size)
        if end == writing.prompt and end % size:
            self.pool.name(writing.table, chain.last(writing.tokens, end), end)
        self.prompt_tokens += max(min(end, writing.prompt) - before, 0)
        writing.computed = end

    def _set_back(self, writing: Writing) -> None:
        self._leave(writing)
        writing.computed = 0
        insort(self.waiting, writing, key=lambda one: one.number)

    def _leave(self, writing: Writing) -> None:
        assert writing.table is not None
        self.pool.release(writing.table)
        self.running.remove(writing)
        self._slots.append(writing.slot)
        self._slots.sort(reverse=True)
        writing.table, writing.slot = None, -1
