"""Reads the kernel's log, where that is allowed (as root, or with dmesg_restrict off)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator


def read_messages(since: float = 0.0) -> Iterator[str]:
    """Yield the messages since a wall-clock time, oldest first. Yields nothing if the log can't be read."""
    try:
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return
    # The log counts from boot and stops while the machine sleeps, so after a sleep its times are too early.
    booted = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
    try:
        while True:
            try:
                record = os.read(fd, 8192).decode("utf-8", "replace")
            except BrokenPipeError:
                continue  # our position was overwritten; the next read returns the oldest message
            except OSError:
                return  # EAGAIN at the end of the log
            head, _, text = record.partition(";")
            fields = head.split(",")
            if len(fields) > 2 and fields[2].isdigit() and booted + int(fields[2]) / 1e6 < since:
                continue
            yield text.partition("\n")[0]
    finally:
        os.close(fd)


def is_same_gpu(pci: str, logged_pci: str) -> bool:
    """Compare a PCI address of NVML (00000000:3b:00.0) with one of the kernel's log (0000:3b:00, or 0000:3b:00.0)."""
    nvml_pci, logged_pci = pci.lower().partition(".")[0], logged_pci.lower().partition(".")[0]
    return bool(logged_pci) and nvml_pci.endswith(logged_pci)
