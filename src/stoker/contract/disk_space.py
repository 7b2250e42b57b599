"""Keeps some disk space free while data is written: a packed file may hold any number of bytes, and a full disk stops
everybody's work.
"""

from __future__ import annotations

import os

from stoker.contract.errors import EX_CANTCREAT, Refusal
from stoker.contract.units import format_bytes

# The smaller of the two stays free: 2 % of a disk, or 2 GiB on disks above 100 GiB.
RESERVED_FRACTION, MAX_RESERVED_BYTES = 0.02, 2 << 30
_BYTES_BETWEEN_CHECKS = 64 << 20  # so that statvfs is not called for every small file


class DiskSpace:
    """Checks the free space on the disk of a folder. `hint` tells the user how to choose another folder."""

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
                f"the disk of {self._folder} has {format_bytes(free)} free, and {format_bytes(reserved)} must stay free"
            )
            raise Refusal(f"{line}; {self._hint}", EX_CANTCREAT)
