"""Data is not written to the last of a disk: a packed file may hold any number of bytes, and a full disk stops everybody's work."""

from __future__ import annotations

import os

from stoker.contract.errors import EX_CANTCREAT, Refusal
from stoker.contract.units import format_bytes

SHARE, MOST = 0.02, 2 << 30  # of a disk that stays free: this share of it, and so many bytes at most
_BETWEEN = 64 << 20  # bytes between two looks: what is smaller than that is written wherever it fits


class DiskSpace:
    """`hint`: how to name another place."""

    def __init__(self, folder: str, hint: str) -> None:
        self._folder, self._hint, self._unseen = folder, hint, 0

    def take(self, size: int) -> None:
        """So many bytes were written, or are about to be."""
        self._unseen += size
        if self._unseen < _BETWEEN:
            return
        self._unseen = 0
        disk = os.statvfs(self._folder)
        left, kept = disk.f_bavail * disk.f_frsize, min(int(SHARE * disk.f_blocks * disk.f_frsize), MOST)
        if disk.f_blocks and left < kept:  # some network mounts say nothing
            line = f"{self._folder}: its disk has {format_bytes(left)} left, and {format_bytes(kept)} stay free; {self._hint}"
            raise Refusal(line, EX_CANTCREAT)
