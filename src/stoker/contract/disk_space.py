"""Keeps some disk space free while data is written: a packed file may hold any number of bytes, and a full disk stops
everybody's work.
"""

from __future__ import annotations

import os

from stoker.contract.errors import EX_CANTCREAT, Refusal
from stoker.contract.units import format_bytes

RESERVED_FRACTION, MAX_RESERVED_BYTES = 0.02, 2 << 30  # of a disk stay free: the smaller of the two
_BYTES_BETWEEN_CHECKS = 64 << 20  # smaller files are written without a look at the disk


class DiskSpace:
    """Watches the disk of a folder. `hint` tells the user how to choose another folder."""

    def __init__(self, folder: str, hint: str) -> None:
        self._folder, self._hint, self._unchecked = folder, hint, 0

    def take(self, size: int) -> None:
        """Count bytes that are about to be written, or were. Raises Refusal when the disk gets too full."""
        self._unchecked += size
        if self._unchecked < _BYTES_BETWEEN_CHECKS:
            return
        self._unchecked = 0
        disk = os.statvfs(self._folder)
        total, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
        reserved = min(int(RESERVED_FRACTION * total), MAX_RESERVED_BYTES)
        if total and free < reserved:  # some network mounts report a size of 0
            line = (
                f"{self._folder}: its disk has {format_bytes(free)} left, and {format_bytes(reserved)} must stay free"
            )
            raise Refusal(f"{line}; {self._hint}", EX_CANTCREAT)
