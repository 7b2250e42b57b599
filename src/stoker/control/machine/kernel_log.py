"""The kernel's log, where we may read it (root, or dmesg_restrict off)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator


def lines(since: float = 0.0) -> Iterator[str]:
    """Messages, oldest first; those from before `since` (wall clock) left out. Nothing where it can't be read."""
    try:
        handle = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return
    # Its clock; a machine that slept is off by that sleep.
    booted = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
    try:
        while True:
            try:
                record = os.read(handle, 8192).decode("utf-8", "replace")
            except BrokenPipeError:
                continue  # the ring moved on under us: the next read is the oldest message left
            except OSError:
                return  # EAGAIN: the end of the log
            head, _, text = record.partition(";")
            words = head.split(",")
            if len(words) > 2 and words[2].isdigit() and booted + int(words[2]) / 1e6 < since:
                continue
            yield text.partition("\n")[0]
    finally:
        os.close(handle)


def same_card(pci: str, where: str) -> bool:
    """NVML says 00000000:3b:00.0, the kernel's log 0000:3b:00, and sometimes with the function behind it."""
    mine, theirs = pci.lower().partition(".")[0], where.lower().partition(".")[0]
    return bool(theirs) and mine.endswith(theirs)
