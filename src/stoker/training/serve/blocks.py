"""Who holds which block of the paged cache. No torch: numbers of blocks only.

A block has the keys and values of `size` tokens in a row. Sequences that begin alike hold the same blocks. A block is
known by a chain hash, of its tokens and of all before it; so is the partly filled block at a prompt's end, whose second
holder copies it before it writes. A block that nobody holds keeps its content until the memory is needed: the one that
was released first goes first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence

from stoker.contract.frozen import frozen

Key = bytes


class Chain:
    """The keys of a growing sequence's blocks. `root`: what else the cached numbers depend on, the weights' version say."""

    def __init__(self, size: int, root: str = "") -> None:
        self._size, self._keys = size, list[Key]()
        self._root = hashlib.blake2b(root.encode(), digest_size=16).digest()

    def full(self, tokens: Sequence[int], end: int) -> list[Key]:
        """Of the full blocks of tokens[:end]."""
        count = end // self._size
        while len(self._keys) < count:
            begin = len(self._keys) * self._size
            self._keys.append(self._key(tokens[begin : begin + self._size]))
        return self._keys[:count]

    def last(self, tokens: Sequence[int], end: int) -> Key:
        """Of the last block of tokens[:end], full or not."""
        full = self.full(tokens, end)
        rest = tokens[len(full) * self._size : end]
        return self._key(rest, len(full)) if rest else full[-1]

    def _key(self, tokens: Sequence[int], behind: int | None = None) -> Key:
        behind = len(self._keys) if behind is None else behind
        parent = self._keys[behind - 1] if behind else self._root
        return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


@frozen
class Copy:
    """A block's whole content, before anything is written to either."""

    source: int
    target: int


class Table:
    """A sequence's blocks, in the order of its tokens."""

    def __init__(self, blocks: Iterable[int] = ()) -> None:
        self.blocks = list(blocks)


class Pool:
    def __init__(self, count: int, size: int) -> None:
        assert count > 0 and size > 0
        self.count, self.size = count, size
        self._free = list(range(count - 1, -1, -1))  # the last is taken first
        self._holders = [0] * count
        self._by_key: dict[Key, int] = {}
        self._keys: list[dict[Key, int]] = [{} for _ in range(count)]  # and how many of the block's tokens it speaks of
        self._idle: dict[int, None] = {}  # held by nobody, with content; in the order they were released

    @property
    def available(self) -> int:
        return len(self._free) + len(self._idle)

    @property
    def held(self) -> int:
        return self.count - self.available

    def needed(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def is_held(self, block: int) -> bool:
        return self._holders[block] > 0

    def known(self, keys: Iterable[Key]) -> list[int]:
        """The blocks of the longest run of known keys."""
        found: list[int] = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def opened(self, shared: Sequence[int], tokens: int, spare: int = 0) -> Table | None:
        """Begins with the known blocks `shared` and has blocks for all `tokens`. None: `spare` blocks would not be left."""
        idle = sum(block in self._idle for block in shared)
        fresh = self.needed(tokens) - len(shared)
        if fresh > self.available - idle - spare:
            return None
        for block in shared:
            self._hold(block)
        return Table([*shared, *(self._take() for _ in range(fresh))])

    def grow(self, table: Table, begin: int, end: int, again: bool = False) -> list[Copy] | None:
        """Makes room for tokens[begin:end] to be written: blocks behind the last, and one's own for those that others hold,
        too. None: there are not enough, and nothing has changed. `again`: they are what is there already.
        """
        if end <= len(table.blocks) * self.size and begin // self.size == len(table.blocks) - 1:
            last = table.blocks[-1]
            if self._holders[last] == 1 and not self._keys[last]:  # what most tokens find
                return []
        shared = [
            place
            for place in range(begin // self.size, min(self.needed(end), len(table.blocks)))
            if self._holders[table.blocks[place]] > 1
        ]
        more = max(self.needed(end) - len(table.blocks), 0)
        if len(shared) + more > self.available:
            return None
        copies = []
        self._written(table, end if again else begin)
        for place in shared:
            source = table.blocks[place]
            table.blocks[place] = self._take()
            copies.append(Copy(source, table.blocks[place]))
            self._drop(source)
        table.blocks += [self._take() for _ in range(more)]
        return copies

    def _written(self, table: Table, begin: int) -> None:
        """What is written over is no longer known. Of a block that others hold, too, a copy will be written."""
        for place in range(begin // self.size, len(table.blocks)):
            block = table.blocks[place]
            if self._holders[block] > 1:
                continue
            for key in [key for key, tokens in self._keys[block].items() if place * self.size + tokens > begin]:
                del self._keys[block][key], self._by_key[key]

    def name(self, table: Table, key: Key, end: int) -> None:
        """The block of the token before `end` is computed up to there: who begins alike may share it. The first counts."""
        place = (end - 1) // self.size
        block = table.blocks[place]
        if key not in self._by_key:
            self._by_key[key] = block
            self._keys[block][key] = end - place * self.size

    def release(self, table: Table) -> None:
        for block in reversed(table.blocks):  # a beginning is of use to more: its end goes first
            self._drop(block)
        table.blocks.clear()

    def forget(self) -> None:
        """No content is of use any more."""
        for block in self._idle:
            self._free.append(block)
        self._idle.clear()
        self._by_key.clear()
        for keys in self._keys:
            keys.clear()

    def _hold(self, block: int) -> None:
        self._idle.pop(block, None)
        self._holders[block] += 1

    def _drop(self, block: int) -> None:
        self._holders[block] -= 1
        if self._holders[block] == 0:
            if self._keys[block]:
                self._idle[block] = None
            else:
                self._free.append(block)

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block = next(iter(self._idle))
            del self._idle[block]
            for key in self._keys[block]:
                del self._by_key[key]
            self._keys[block].clear()
        self._holders[block] = 1
        return block

    def problems(self, tables: Sequence[Table]) -> Iterator[str]:
        """What is wrong where these are all the tables there are; for tests."""
        holders = [0] * self.count
        for table in tables:
            if len(set(table.blocks)) < len(table.blocks):
                yield f"a table has a block twice: {table.blocks}"
            for block in table.blocks:
                holders[block] += 1
        if holders != self._holders:
            yield f"holders are {holders}, counted {self._holders}"
        unheld = {block for block in range(self.count) if not holders[block]}
        if len(self._free) + len(self._idle) != len(unheld) or {*self._free, *self._idle} != unheld:
            yield f"nobody holds {sorted(unheld)}; free {sorted(self._free)}, idle {sorted(self._idle)}"
        if {key: block for block, keys in enumerate(self._keys) for key in keys} != self._by_key:
            yield "keys and blocks disagree"
        if any(self._keys[block] for block in self._free) or not all(self._keys[block] for block in self._idle):
            yield "idle blocks have a content and free ones have none"
