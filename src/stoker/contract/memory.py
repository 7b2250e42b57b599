"""The memory limit of a process: that of preparation workers and of ranks on the CPU."""

from __future__ import annotations

import os
import resource

_PAGE = os.sysconf("SC_PAGE_SIZE")


def used_memory() -> int:
    """Bytes, as RLIMIT_DATA counts them."""
    handle = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return int(os.read(handle, 200).split()[5]) * _PAGE
    finally:
        os.close(handle)


def limit_to(size: int) -> None:
    """Of this process, from now on; never more than it may have already."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [size, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
