"""Beats of a rank: a page of shared memory that the rank writes at each step and its agent reads.

Shared memory costs one store of 29 bytes per beat and no system call, never blocks the rank and wakes nobody. A
script that closes every descriptor it doesn't know can't break it, as it would a pipe. The page holds the last 256
beats.
"""

from __future__ import annotations

import struct
from mmap import mmap

VERSION = 1
_HEADER = struct.Struct("<IIQ")  # version, pid, number of beats written
_BEAT = struct.Struct("<Qqd?I")  # time_ns, step, loss, has_loss, optimizer
RING_AT = 16
SLOTS = 256
PAGE_SIZE = RING_AT + SLOTS * _BEAT.size
# No script makes more steps between two reads, so a larger count was not written by us.
MAX_NEW_BEATS = 100_000_000
_COUNT = struct.Struct("<Q")
_COUNT_AT = 8


class Beat:
    """One optimizer step of a rank. Not a dataclass: every rank imports this file, and dataclasses cost 10 ms there."""

    __slots__ = ("loss", "optimizer", "step", "time_ns")

    def __init__(self, time_ns: int, step: int, loss: float | None, optimizer: int) -> None:
        self.time_ns, self.step, self.loss, self.optimizer = time_ns, step, loss, optimizer


class BeatWriter:
    """Writes the beats of this rank into its page."""

    def __init__(self, memory: mmap, pid: int) -> None:
        self._memory = memory
        self._written = 0
        _HEADER.pack_into(memory, 0, VERSION, pid, 0)

    def beat(self, time_ns: int, step: int, optimizer: int = 0, loss: float | None = None) -> None:
        offset = RING_AT + (self._written % SLOTS) * _BEAT.size
        _BEAT.pack_into(self._memory, offset, time_ns, step, loss or 0.0, loss is not None, optimizer)
        self._written += 1
        _COUNT.pack_into(self._memory, _COUNT_AT, self._written)  # last: a reader that sees the count sees the beat


class BeatReader:
    """Reads a rank's beats. Sets `is_overwritten` once the page holds something else."""

    def __init__(self, memory: mmap) -> None:
        self._memory = memory
        self.read_count = 0
        self.is_overwritten = False

    @property
    def written(self) -> int:
        return int(_COUNT.unpack_from(self._memory, _COUNT_AT)[0])

    def read_new(self) -> list[Beat]:
        """Return the beats since the last call, at most the newest SLOTS - 1 of them."""
        version, _, written = _HEADER.unpack_from(self._memory, 0)
        if written < self.read_count or written - self.read_count > MAX_NEW_BEATS or version != VERSION:
            self.is_overwritten = True  # the page is the script's memory too, and the script wrote over it
        if self.is_overwritten:
            return []
        beats = []
        for number in range(max(self.read_count, written - SLOTS + 1, 0), written):
            offset = RING_AT + (number % SLOTS) * _BEAT.size
            time_ns, step, loss, has_loss, optimizer = _BEAT.unpack_from(self._memory, offset)
            beats.append(Beat(time_ns, step, loss if has_loss else None, optimizer))
        self.read_count = written
        return beats
