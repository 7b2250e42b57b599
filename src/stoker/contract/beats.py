"""A rank's beats: a page of shared memory the rank writes and its agent reads.

Memory, not a pipe: a beat is a store of 40 bytes with no system call, nobody is woken by it, it can't block the rank,
and a script that closes every descriptor it doesn't know can't break it. The reader looks when it likes and finds the
last 256 beats.
"""

from __future__ import annotations

import struct
from mmap import mmap

VERSION = 1
_HEAD = struct.Struct("<IIQ32s")  # version, pid, beats written so far, phase
_BEAT = struct.Struct("<QqdqII")  # time_ns, step, loss, tokens, optimizer, flags
RING_AT = 64
SLOTS = 256
SIZE = RING_AT + SLOTS * _BEAT.size
MOST = 100_000_000  # beats between two looks: more than any script can make
_VERSION = struct.Struct("<I")
_COUNT = struct.Struct("<Q")
_COUNT_AT = 8
_PHASE_AT = 16

FROM_SCRIPT = 1  # stoker.beat(), not the optimizer hook
HAS_LOSS = 2
HAS_TOKENS = 4


class Beat:
    """Not a dataclass: this file is imported in every rank, and dataclasses alone cost 10 ms there."""

    __slots__ = ("flags", "loss", "optimizer", "step", "time_ns", "tokens")

    def __init__(
        self, time_ns: int, step: int, optimizer: int, flags: int, loss: float | None, tokens: int | None
    ) -> None:
        self.time_ns = time_ns
        self.step = step
        self.optimizer = optimizer
        self.flags = flags
        self.loss = loss
        self.tokens = tokens


class Writer:
    def __init__(self, memory: mmap, pid: int) -> None:
        self._memory = memory
        self._written = 0
        _HEAD.pack_into(memory, 0, VERSION, pid, 0, b"")

    def beat(
        self, time_ns: int, step: int, optimizer: int = 0, flags: int = 0, loss: float = 0.0, tokens: int = 0
    ) -> None:
        n = self._written
        _BEAT.pack_into(self._memory, RING_AT + (n % SLOTS) * _BEAT.size, time_ns, step, loss, tokens, optimizer, flags)
        self._written = n = n + 1
        _COUNT.pack_into(self._memory, _COUNT_AT, n)  # last: a reader that sees the count sees the beat

    def phase(self, name: str) -> None:
        struct.pack_into("<32s", self._memory, _PHASE_AT, name.encode()[:32])


class Reader:
    def __init__(self, memory: mmap) -> None:
        self._memory = memory
        self.seen = 0
        self.torn = False

    @property
    def written(self) -> int:
        return int(_COUNT.unpack_from(self._memory, _COUNT_AT)[0])

    @property
    def phase(self) -> str:
        return bytes(struct.unpack_from("<32s", self._memory, _PHASE_AT)[0]).rstrip(b"\0").decode("utf-8", "replace")

    def new(self) -> list[Beat]:
        """The beats since the last call; at most the newest SLOTS - 1 of them."""
        written = self.written
        if written < self.seen or written - self.seen > MOST or _VERSION.unpack_from(self._memory, 0)[0] != VERSION:
            self.torn = True  # somebody wrote over the page: it is the script's memory too
        if self.torn:
            return []
        first = max(self.seen, written - SLOTS + 1, 0)
        self.seen = written
        return [self._at(n) for n in range(first, written)]

    def _at(self, n: int) -> Beat:
        time_ns, step, loss, tokens, optimizer, flags = _BEAT.unpack_from(
            self._memory, RING_AT + (n % SLOTS) * _BEAT.size
        )
        return Beat(
            time_ns, step, optimizer, flags, loss if flags & HAS_LOSS else None, tokens if flags & HAS_TOKENS else None
        )
