"""The decoder over a paged cache: generate/cached.py's execution, with the slots of one long row shared out in blocks.

Everything a token step reads or writes has a fixed place, so that on a GPU it can be one CUDA graph. The host writes the
rows' blocks, positions and settings, and reads tokens; the token that the next step begins with stays on the device. So do
positions, for as many steps as the host has told the numbers of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.contract.frozen import frozen, replace
from stoker.training.generate import plain
from stoker.training.generate.cached import Attention, Blocks, Cache, Weights, as_mask, seen
from stoker.training.generate.config import BUCKET
from stoker.training.generate.graphed import captured
from stoker.training.generate.sample import sample_rows
from stoker.training.model import attention as within
from stoker.training.model.attention import Documents, Seen, attend, documents, seen_behind, seen_by
from stoker.training.serve.adjust import LogitAdjuster
from stoker.training.serve.blocks import Copy, Pool
from stoker.training.serve.request import MOST_ALTERNATIVES, PromptLogprob

GREEDY, PLAIN, FILTERED = range(3)  # what the rows of a step need: each kind is a graph of its own
NO_LOGPROBS, OF_TOKENS, OF_ALTERNATIVES = range(3)
PLACE, LAST, TOP_K, FIRST_BLOCK = range(4)  # columns of what a slot is told: its blocks come last
TEMPERATURE, TOP_P, FIRST_UNIFORM = range(3)
AT_ONCE = 256  # tokens whose logits are in memory


class Row(NamedTuple):  # made for each token: a tenth of the time of a shape
    """What a step needs of a slot's sequence: the token at `place` is computed, and the next one sampled by the rest."""

    slot: int
    blocks: Sequence[int]
    place: int
    last: int  # the last place that is computed, however many steps there are
    uniforms: NDArray[np.float32]  # [turns · turn]
    temperature: float
    top_k: int
    top_p: float


@frozen
class Part:
    """A row's tokens before the one at its `place`, and that, whose keys and values are computed."""

    row: Row
    ids: Sequence[int]
    is_last: bool  # a token is written behind it
    following: Sequence[int] = ()  # tokens behind its first ids, whose log-probabilities are wanted
    alternatives: int = 0  # how many of the most likely tokens, too


@frozen
class Written:
    """Tokens of each row, and what was asked for beside them."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    alternatives: list[list[list[tuple[int, float]]]]
    following: tuple[list[PromptLogprob], ...] = ()  # of each part's


@frozen
class Kind:
    sampling: int
    logprobs: int
    adjusts: bool = False  # some row's logits are adjusted before sampling (adjust.py): never captured as a graph


@frozen
class Kernels:
    """Modules of Triton kernels: generate/kernel.py, and serve/kernel.py."""

    between: Any
    paged: Any


@frozen
class _Group:
    """Parts whose attention is computed together. `begin`: how many tokens of a single part's row came before."""

    queries: Tensor  # which of the step's
    slots: Tensor  # of the cache
    begin: int
    packed: Documents | None = None


class Paged:
    def __init__(
        self, w: Weights, slots: int, length: int, pool: Pool, kernels: Kernels | None = None, captures: bool = True,
        turn: int = 1, turns: int = 1,
    ) -> None:  # fmt: skip
        """`kernels`: of Triton; without them plain torch. `captures`: on GPUs a token step is a graph, which can't hold gathers.
        `turn`: token steps at most that the host does not look at; `turns`: how many of these it may ask for at once.
        """
        self._weights, self._size, self._nobody, self._kernels = w, pool.size, pool.count, kernels
        ops = kernels.between if kernels else plain
        self._prompts, self._tokens = Blocks(w, ops), Blocks(w, ops, captured=True)
        self._angles = self._prompts.angles(lambda table: table[:length])
        self.cache = Cache(
            w, 1, (pool.count + 1) * pool.size
        )  # the last block is nobody's: rows that are not used write there
        self._device = w.embed.device
        # Where documents of a row need a bias, all prompts together would need one of all tokens by all tokens.
        self._packs = (
            kernels is not None and within.packed_kernel(self._device, w.embed.dtype, w.config.head_dim) == "varlen"
        )
        self._across = pool.needed(length)
        self._steps: dict[tuple[int, int, Kind], Callable[[], None]] = {}
        self._graphs = torch.cuda.graph_pool_handle() if captures and self._device.type == "cuda" else None
        self._ids = torch.zeros(slots, dtype=torch.int64, device=self._device)
        self._whole = self._both(slots, FIRST_BLOCK + self._across, torch.int64)
        self._turn = turn
        self._real = self._both(slots, FIRST_UNIFORM + turn * turns, torch.float32)
        self._at = torch.zeros(1, dtype=torch.int64, device=self._device)  # which step since the host was heard
        self._whole[0][:, FIRST_BLOCK:] = self._nobody
        # Whether something in the cache may be no number. Only on a CPU it is looked at, where copies of whole blocks are faster.
        self._has_none = self._device.type != "cpu"
        self._shown: dict[int, list[int]] = {}  # the blocks that each slot's row has there
        # [step, slot, …]: what was written since then
        count = min(MOST_ALTERNATIVES, len(w.head))
        self.adjuster = LogitAdjuster(slots, len(w.head), self._device)
        self._tokens_made = torch.zeros(turn * turns, slots, dtype=torch.int64, device=self._device)
        self._logprobs = torch.zeros(turn * turns, slots, device=self._device)
        self._top = torch.zeros(turn, slots, count, device=self._device)
        self._top_ids = torch.zeros(turn, slots, count, dtype=torch.int64, device=self._device)

    def _both(self, rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(on the host, on the device)."""
        host = torch.zeros(rows, columns, dtype=dtype, pin_memory=self._device.type == "cuda")
        return host, host.to(self._device)

    def forget(self) -> None:
        """The weights lie elsewhere."""
        self._steps.clear()

    def clear(self) -> None:
        """What weights of before computed may be no number, and that times 0 is none either."""
        self.cache.kv.zero_()
        self._has_none = self._device.type != "cpu"

    def copy(self, copies: Sequence[Copy]) -> None:
        if copies:
            blocks = self.cache.kv.view(*self.cache.kv.shape[:4], -1, self._size, self.cache.kv.shape[5])
            sources, targets = (
                torch.tensor(which, device=self._device)
                for which in ([copy.source for copy in copies], [copy.target for copy in copies])
            )
            blocks[:, :, :, :, targets] = blocks[:, :, :, :, sources]

    def prompts(self, parts: Sequence[Part], kind: Kind) -> Written:
        """A token for each part that is the last of its row."""
        ids = torch.tensor([token for part in parts for token in part.ids], device=self._device)
        spans: list[tuple[int, int]] = []
        places, where = [], []
        for part in parts:
            end = part.row.place + 1
            spans.append((end - len(part.ids), end))
            own = torch.arange(*spans[-1], device=self._device)
            places.append(own)
            where.append(self._slots_of(part.row.blocks, own))
        attention = self._attention_of(parts, spans)
        args = (torch.cat(places), self._angles, self.cache.kv, torch.cat(where), len(ids), attention)
        x, delta = self._prompts.run(ids, *args)
        self._look_at(x)
        following = self._following(parts, x, delta)
        last = torch.tensor(_ends(parts))[[part.is_last for part in parts]].to(self._device) - 1
        rows = [part.row for part in parts if part.is_last]
        if not rows:
            return Written([], [], [], following)
        self._tell(rows)
        slots = torch.tensor([row.slot for row in rows], device=self._device)
        logits = self._prompts.logits(x[last], None if delta is None else delta[last])
        self._write(logits, slots, kind)
        if kind.adjusts:
            self.adjuster.counted([row.slot for row in rows], 1)
        return replace(self._read(slots, kind, 1), following=following)

    def _following(self, parts: Sequence[Part], x: Tensor, delta: Tensor | None) -> tuple[list[PromptLogprob], ...]:
        found, begin = [], 0
        for part in parts:
            values: list[PromptLogprob] = []
            for first in range(0, len(part.following), AT_ONCE):
                tokens = torch.tensor(part.following[first : first + AT_ONCE], device=self._device)
                which = slice(begin + first, begin + first + len(tokens))
                logits = self._prompts.logits(x[which], None if delta is None else delta[which])
                values += _prompt_logprobs(logits, tokens, part.row.temperature or 1.0, part.alternatives)
            found.append(values)
            begin += len(part.ids)
        return tuple(found)

    def _slots_of(self, blocks: Sequence[int], places: Tensor) -> Tensor:
        """Of the cache, where tokens at these places of a row lie."""
        table = torch.tensor(blocks, device=self._device)
        return table[places // self._size] * self._size + places % self._size

    def _attention_of(self, parts: Sequence[Part], spans: Sequence[tuple[int, int]]) -> Attention:
        """Each part's queries over all of its row so far."""
        c, windows = self._weights.config, self._weights.windows
        groups = self._groups(parts, spans)
        looks: dict[tuple[int, int], Seen] = {}  # the same in all layers of a view

        def look(group: _Group, view: int, queries: Tensor) -> Seen:
            if group.begin:
                return seen_behind(group.begin, windows[view], queries)
            more: dict[str, Any] = {"head_dim": c.head_dim, "cap": c.attention_cap, "compiled": False}
            return seen_by(group.packed, windows[view], queries, **more)

        def attention(q: Tensor, cached: Tensor, view: int) -> Tensor:
            found = torch.empty(len(q), q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
            for number, group in enumerate(groups):
                k, v = (part[:, :, group.slots].transpose(1, 2) for part in cached)
                queries = q[group.queries][None]
                if (number, view) not in looks:
                    looks[number, view] = look(group, view, queries)
                y = attend(queries, k, v, looks[number, view], 0.0, c.attention_scale or None, c.attention_cap)
                found[group.queries] = y.reshape(queries.shape[1], -1)
            return found

        return attention

    def _groups(self, parts: Sequence[Part], spans: Sequence[tuple[int, int]]) -> list[_Group]:
        """Each part alone; but by kernels for it, all that begin their rows are documents of one packed row."""
        firsts = [number for number, (begin, _) in enumerate(spans) if not begin] if self._packs else []
        together = firsts if len(firsts) > 1 else []
        ends = _ends(parts)
        queries = [torch.arange(end - len(part.ids), end) for part, end in zip(parts, ends, strict=True)]
        rows = [torch.arange(end, device=self._device) for _, end in spans]
        slots = [self._slots_of(part.row.blocks, row) for part, row in zip(parts, rows, strict=True)]
        found = [
            _Group(queries[number].to(self._device), slots[number], spans[number][0])
            for number in range(len(parts))
            if number not in together
        ]
        if together:
            segments = torch.cat([torch.full_like(queries[number], number) for number in together])
            packed = documents(segments[None], self._device)
            own = torch.cat([queries[number] for number in together]).to(self._device)
            found.append(_Group(own, torch.cat([slots[number] for number in together]), 0, packed))
        return found

    def start(self, slot: int, token: int) -> None:
        """The token that the slot's next step computes."""
        self._ids[slot] = token

    def step(
        self, rows: Sequence[Row], kind: Kind, count: int = 1, ended: Callable[[list[list[int]]], bool] | None = None
    ) -> Written:
        """`count` tokens for each row. Behind a row's last place they mean nothing. `ended`: whether nobody needs more, by the
        rows' next tokens: it is asked turn by turn, while the one after that is computed, and may leave out the rest.
        """
        self._show(rows)
        self._tell(rows)
        width = max(row.slot for row in rows) + 1
        if self._graphs is not None:
            width = min(1 << (width - 1).bit_length(), len(self._ids))
        longest = max(min(row.place + count, row.last + 1) for row in rows)
        looked_at = min(-(-(-(-longest // BUCKET) * BUCKET) // self._size), self._across)
        if self._kernels:  # which read as much as there is
            looked_at = self._across
        step = self._step(width, looked_at, kind)
        slots = torch.tensor([row.slot for row in rows], device=self._device)
        coming: Callable[[], list[list[int]]] | None = None
        made = 0
        while made < count:
            begin, made = made, min(made + self._turn, count)
            for _ in range(begin, made):
                step()
            if ended is None or count <= self._turn:
                continue
            before, coming = coming, self._later(self._tokens_made[begin:made, slots])
            if before is not None and ended(before()):
                break
        if kind.adjusts:
            self.adjuster.counted([row.slot for row in rows], made)
        return self._read(slots, kind, made)

    def _later(self, made: Tensor) -> Callable[[], list[list[int]]]:
        """These tokens of each row, when they are asked for; the device goes on meanwhile."""
        if self._device.type != "cuda":
            return made.t().tolist
        host = torch.empty(made.shape, dtype=made.dtype, pin_memory=True)
        host.copy_(made, non_blocking=True)
        there = torch.cuda.Event()  # type: ignore[no-untyped-call]
        there.record()

        def read() -> list[list[int]]:
            there.synchronize()
            found: list[list[int]] = host.t().tolist()
            return found

        return read

    def _show(self, rows: Sequence[Row]) -> None:
        """The rows' blocks, and nobody's for slots that are not among them. Few change from step to step."""
        tables = self._whole[0].numpy()[:, FIRST_BLOCK:]
        for slot in self._shown.keys() - {row.slot for row in rows}:
            tables[slot] = self._nobody
            del self._shown[slot]
        for slot, blocks, *_ in rows:
            if self._shown.get(slot) != blocks:
                tables[slot, : len(blocks)] = blocks
                tables[slot, len(blocks) :] = self._nobody
                self._shown[slot] = list(blocks)

    def _tell(self, rows: Sequence[Row]) -> None:
        slots, _, places, lasts, uniforms, temperatures, top_k, top_p = zip(*rows, strict=True)
        whole, real = self._whole[0].numpy(), self._real[0].numpy()
        whole[:, PLACE] = whole[:, LAST] = 0
        for column, values in ((PLACE, places), (LAST, lasts), (TOP_K, top_k)):
            whole[slots, column] = values
        for column, numbers in ((TEMPERATURE, temperatures), (TOP_P, top_p)):
            real[slots, column] = numbers
        real[slots, FIRST_UNIFORM:] = uniforms
        self._at.zero_()
        for host, device in (self._whole, self._real):
            if host is not device:
                device.copy_(host, non_blocking=True)

    def _step(self, width: int, looked_at: int, kind: Kind) -> Callable[[], None]:
        if (width, looked_at, kind) not in self._steps:

            def step() -> None:
                self._one(width, looked_at, kind)

            if self._graphs is None or kind.adjusts:
                return step
            # It runs once before it is captured: what that changes is put back.
            changed = (self._ids, self._whole[1], self._at)
            before = [one.clone() for one in changed]
            self._steps[width, looked_at, kind] = captured(step, self._graphs)
            for one, kept in zip(changed, before, strict=True):
                one.copy_(kept)
        return self._steps[width, looked_at, kind]

    def _one(self, width: int, looked_at: int, kind: Kind) -> None:
        size, told = self._size, self._whole[1][:width]
        places, tables = told[:, PLACE].clone(), told[:, FIRST_BLOCK:]
        where = tables.gather(1, (places // size)[:, None])[:, 0] * size + places % size
        attention = self._by_kernel(told) if self._kernels else self._by_gathering(places, tables, looked_at)
        args = (places, self._angles, self.cache.kv, where, width, attention)
        x, delta = self._tokens.run(self._ids[:width], *args)
        self._look_at(x)
        whose = tables[:, 0] != self._nobody
        self._write(self._tokens.logits(x, delta), slice(width), kind, whose)
        told[:, PLACE] = torch.minimum(places + 1, told[:, LAST])
        self._at += 1

    def _look_at(self, x: Tensor) -> None:
        """A key or a value that is no number makes none of its own token's sum."""
        if not self._has_none:
            self._has_none = not bool(x.isfinite().all())

    def _by_kernel(self, told: Tensor) -> Attention:
        assert self._kernels is not None
        paged, scale = self._kernels.paged, self._weights.config.attention_scale or None

        def attention(q: Tensor, cached: Tensor, view: int) -> Tensor:
            y: Tensor = paged.attend(q, cached, told, FIRST_BLOCK, self._size, scale)
            return y

        return attention

    def _by_gathering(self, places: Tensor, tables: Tensor, looked_at: int) -> Attention:
        c, size = self._weights.config, self._size
        slots = torch.arange(looked_at * size, device=self._device)
        index = (tables[:, :looked_at, None] * size + slots[:size]).flatten(1)
        # What is not a row's own is not read where it may be no number.
        index = torch.where(slots <= places[:, None], index, index[:, :1])
        blocks, end = None if self._has_none else tables[:, :looked_at].flatten(), len(slots)
        masks = [
            as_mask(seen(slots, places + 1, end, end - 1, window), self.cache.kv.dtype)
            for window in self._weights.windows
        ]

        def attention(q: Tensor, cached: Tensor, view: int) -> Tensor:
            if blocks is None:
                own = cached[:, 0][:, :, index]
            else:
                whole = cached.view(2 * c.kv_heads, -1, size * c.head_dim).index_select(1, blocks)
                own = whole.view(2, c.kv_heads, len(tables), end, c.head_dim)
            own = own.transpose(1, 2)  # [2, rows, kv_heads, slots, head_dim]
            return plain.attend(q, own, masks[view], c.attention_scale or None, c.attention_cap)

        return attention

    def _write(self, logits: Tensor, slots: Tensor | slice, kind: Kind, whose: Tensor | None = None) -> None:
        """Samples a token for each of these slots, and leaves it there; `whose`: only in those that are somebody's."""
        real = self._real[1][slots]
        temperature, top_p = real[:, TEMPERATURE], real[:, TOP_P]
        unadjusted = logits
        if kind.adjusts:
            logits = self.adjuster.apply(logits, slots, temperature)
        if kind.sampling == GREEDY:
            token = logits.argmax(-1)
        else:
            top_k, filtered = self._whole[1][slots, TOP_K], kind.sampling == FILTERED
            uniform = real[:, FIRST_UNIFORM:].index_select(1, self._at)[:, 0]
            draw = self._kernels.between.sample_token if self._kernels else None
            token = sample_rows(logits, uniform, temperature, top_k, top_p, filtered, draw)
        if kind.adjusts:
            self.adjuster.count(token, slots, whose)
        self._ids[slots] = token if whose is None else torch.where(whose, token, self._ids[slots])
        self._tokens_made[self._at, slots] = token
        if kind.logprobs != NO_LOGPROBS:
            warmth = torch.where(temperature > 0, temperature, 1.0)[:, None]
            every = torch.log_softmax(unadjusted.float() / warmth, -1)
            self._logprobs[self._at, slots] = every.gather(-1, token[:, None])[:, 0]
            if kind.logprobs == OF_ALTERNATIVES:
                self._top[self._at, slots], self._top_ids[self._at, slots] = every.topk(self._top.shape[2], dim=-1)

    def _read(self, slots: Tensor, kind: Kind, count: int) -> Written:
        """Waits for the device."""

        def listed(made: Tensor) -> list[Any]:
            found: list[Any] = made[:count, slots].transpose(0, 1).tolist()
            return found

        tokens = listed(self._tokens_made)
        if kind.logprobs == NO_LOGPROBS:
            return Written(tokens, [], [])
        logprobs = listed(self._logprobs)
        if kind.logprobs == OF_TOKENS:
            return Written(tokens, logprobs, [])
        alternatives = [
            [list(zip(*pair, strict=True)) for pair in zip(*row, strict=True)]
            for row in zip(listed(self._top_ids), listed(self._top), strict=True)
        ]
        return Written(tokens, logprobs, alternatives)


def _prompt_logprobs(logits: Tensor, tokens: Tensor, temperature: float, alternatives: int) -> list[PromptLogprob]:
    """Return how likely each of `tokens` is by the logits in front of it."""
    every = torch.log_softmax(logits.float() / temperature, -1)
    # gather and topk read the same numbers: clients compare the two to see whether a token was the most likely one.
    own = every.gather(-1, tokens[:, None])
    ranks = 1 + (every > own).sum(-1)
    values, ids = every.topk(min(alternatives, every.shape[-1]), dim=-1)
    most_likely = [tuple(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values.tolist(), strict=True)]
    return list(map(PromptLogprob, own[:, 0].tolist(), ranks.tolist(), most_likely))


def _ends(parts: Sequence[Part]) -> list[int]:
    """Where each part's tokens end among those of all."""
    return list(accumulate(len(part.ids) for part in parts))
