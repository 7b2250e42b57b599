"""The host's memory and limits, the cgroup's where it is tighter."""

from __future__ import annotations

import os
import re
import resource
import time

from stoker.contract.host_memory import cgroup_dirs, meminfo_lines, read_number
from stoker.contract.process import kernel_lines, read_kernel_file
from stoker.control.machine import examination


def oom_kills() -> int | None:
    """How often the kernel's OOM killer has struck in this cgroup."""
    folders, v2 = cgroup_dirs("memory")
    if not folders:
        return None
    lines = kernel_lines(f"{folders[0]}/{'memory.events' if v2 else 'memory.oom_control'}")
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def shared_memory() -> tuple[int | None, int | None]:
    """(free, total) bytes of /dev/shm."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None, None
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize


# Others may be on a server that does not answer, and statvfs would wait for it.
_LOCAL = ("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs")
_FULL = 1 << 20  # bytes: with less than this free, or without free inodes, a file system is full


def full_disks() -> list[tuple[str, int, int]]:
    """Return (mount point, free bytes, total bytes) of each local file system that is full and can be written to."""
    full = []
    for line in kernel_lines("/proc/mounts"):
        path, kind = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), line.split()[1]), line.split()[2]
        if kind not in _LOCAL:
            continue
        try:
            disk = os.statvfs(path)
        except OSError:
            continue  # not ours to see, or gone since
        free, has_inodes = disk.f_bavail * disk.f_frsize, disk.f_favail > 0 or not disk.f_files
        if disk.f_blocks and not disk.f_flag & os.ST_RDONLY and (free < _FULL or not has_inodes):
            full.append((path, free, disk.f_blocks * disk.f_frsize))
    return full


def swap_used() -> int | None:
    total, free = meminfo_lines("SwapTotal", "SwapFree")
    return None if total is None or free is None else total - free


def cores() -> int:
    """Those this process may use: by affinity, and by the cgroup's quota, which gives a pod 8 of 128."""
    return min([len(os.sched_getaffinity(0)), *_quotas(*cgroup_dirs("cpu"))])


def _quotas(folders: list[str], v2: bool) -> list[int]:
    found = []
    for folder in folders:
        if v2:
            quota, _, period = read_kernel_file(f"{folder}/cpu.max").strip().partition(" ")
        else:
            quota, period = (read_kernel_file(f"{folder}/cpu.cfs_{one}_us").strip() for one in ("quota", "period"))
        if quota.isdigit() and period.isdigit() and int(period):
            found.append(max(1, -(-int(quota) // int(period))))
    return found


def max_processes() -> int | None:
    """The tightest of the kernel's, the user's and the cgroup's limits."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limits = [
        read_number("/proc/sys/kernel/pid_max"),
        read_number("/sys/fs/cgroup/pids.max"),
        None if soft < 0 else soft,
    ]
    return min((limit for limit in limits if limit is not None), default=None)


def raise_files_limit() -> int:
    """The soft limit on open files up to the hard one, for this process. Returns what it was."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft


def max_files() -> int | None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if hard < 0 else hard


def cpus_near(pci: str) -> list[int]:
    """The CPUs near a PCI device; empty if unknown. NVML's bus id has eight digits of domain, sysfs four."""
    domain, _, rest = pci.lower().partition(":")
    words = read_kernel_file(f"/sys/bus/pci/devices/{domain[-4:]}:{rest}/local_cpulist").strip().split(",")
    ranges = (word.partition("-") for word in words if word)
    return [cpu for low, dash, high in ranges for cpu in range(int(low), int(high or low) + 1)]


def quick_host(disk: str) -> examination.Host:
    """Room and limits that take no time to ask. No look at other processes: that is the examination's."""
    while disk and not os.path.isdir(disk):
        disk = os.path.dirname(disk)
    space = os.statvfs(disk or ".")
    shm_free, shm_total = shared_memory()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    address, _ = resource.getrlimit(resource.RLIMIT_AS)
    return examination.Host(
        shm_total=shm_total,
        shm_free=shm_free,
        disk_free=space.f_bavail * space.f_frsize,
        disk_path=disk or ".",
        files_soft=None if soft < 0 else soft,
        files_hard=None if hard < 0 else hard,
        address_space=None if address < 0 else address,
        swap_used=swap_used(),
        clock=time.time(),
    )
