"""Room and limits of the host that take no time to ask: shared memory, disk, descriptors, address space."""

from __future__ import annotations

import os
import resource
import time

from stoker.control.machine import facts, host


def quick_host(disk: str) -> facts.Host:
    """No look at other processes: that is the examination's."""
    while disk and not os.path.isdir(disk):
        disk = os.path.dirname(disk)
    space, shm = os.statvfs(disk or "."), os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    address, _ = resource.getrlimit(resource.RLIMIT_AS)
    return facts.Host(
        shm_total=shm.f_blocks * shm.f_frsize if shm else None,
        shm_free=shm.f_bavail * shm.f_frsize if shm else None,
        disk_free=space.f_bavail * space.f_frsize,
        disk_path=disk or ".",
        files_soft=None if soft < 0 else soft,
        files_hard=None if hard < 0 else hard,
        address_space=None if address < 0 else address,
        swap_used=host.swap_used(),
        clock=time.time(),
    )
