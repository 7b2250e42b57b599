"""A rank's beats: a page of shared memory the rank writes and its agent reads.

Memory, not a pipe: a beat is a store of 29 bytes with no system call, nobody is woken by it, it can't block the rank,
and a script that closes every descriptor it doesn't know can't break it. The reader looks when it likes and finds the
last 256 beats.
"""

from __future__ import annotations

import struct
from mmap import mmap

VERSION = 1
_HEAD = struct.Struct("<IIQ")  # version, pid, beats written so far
_BEAT = struct.Struct("<Qqd?I")  # time_ns, step, loss, whether there is one, optimizer
RING_AT = 16
SLOTS = 256
PAGE_SIZE = RING_AT + SLOTS * _BEAT.size
MOST = 100_000_000  # beats between two looks: more than any script can make
_COUNT = struct.Struct("<Q")
_COUNT_AT = 8


class Beat:
    """Not a dataclass: this file is imported in every rank, and dataclasses alone cost 10 ms there."""

    __slots__ = ("loss", "optimizer", "step", "time_ns")

    def __init__(self, time_ns: int, step: int, loss: float | None, optimizer: int) -> None:
        self.time_ns, self.step, self.loss, self.optimizer = time_ns, step, loss, optimizer


class BeatWriter:
    def __init__(self, memory: mmap, pid: int) -> None:
        self._memory = memory
        self._written = 0
        _HEAD.pack_into(memory, 0, VERSION, pid, 0)

    def beat(self, time_ns: int, step: int, optimizer: int = 0, loss: float | None = None) -> None:
        at = RING_AT + (self._written % SLOTS) * _BEAT.size
        _BEAT.pack_into(self._memory, at, time_ns, step, loss or 0.0, loss is not None, optimizer)
        self._written += 1
        _COUNT.pack_into(self._memory, _COUNT_AT, self._written)  # last: a reader that sees the count sees the beat


class BeatReader:
    def __init__(self, memory: mmap) -> None:
        self._memory = memory
        self.seen = 0
        self.torn = False

    @property
    def written(self) -> int:
        return int(_COUNT.unpack_from(self._memory, _COUNT_AT)[0])

    def new(self) -> list[Beat]:
        """The beats since the last call; at most the newest SLOTS - 1 of them."""
        version, _, written = _HEAD.unpack_from(self._memory, 0)
        if written < self.seen or written - self.seen > MOST or version != VERSION:
            self.torn = True  # somebody wrote over the page: it is the script's memory too
        if self.torn:
            return []
        first = max(self.seen, written - SLOTS + 1, 0)
        self.seen = written
        return [self._at(n) for n in range(first, written)]

    def _at(self, n: int) -> Beat:
        place = RING_AT + (n % SLOTS) * _BEAT.size
        time_ns, step, loss, has_loss, optimizer = _BEAT.unpack_from(self._memory, place)
        return Beat(time_ns, step, loss if has_loss else None, optimizer)
