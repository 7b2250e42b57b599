"""Reads the host's cores, limits, disks and shared memory, or the cgroup's limits where they are tighter."""

from __future__ import annotations

import os
import re
import resource
import time

from stoker.contract.host_memory import find_cgroup_dirs, read_meminfo_values, read_number
from stoker.contract.process import read_kernel_file, read_kernel_lines
from stoker.control.machine import examination

# statvfs on any other file system may wait for a server that is not responding.
_LOCAL_FILE_SYSTEMS = ("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs")
_FULL_BYTES = 1 << 20  # with less than this free, or without free inodes, a file system is full


def count_oom_kills() -> int | None:
    """Return how many processes of this cgroup the kernel's OOM killer has killed."""
    folders, is_v2 = find_cgroup_dirs("memory")
    if not folders:
        return None
    lines = read_kernel_lines(f"{folders[0]}/{'memory.events' if is_v2 else 'memory.oom_control'}")
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def read_shm_space() -> tuple[int | None, int | None]:
    """Return the (free, total) bytes of /dev/shm."""
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return None, None
    return status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize


def find_full_disks() -> list[tuple[str, int, int]]:
    """Return (mount point, free bytes, total bytes) of each local file system that is full and can be written to."""
    full = []
    for line in read_kernel_lines("/proc/mounts"):
        path, kind = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), line.split()[1]), line.split()[2]
        if kind not in _LOCAL_FILE_SYSTEMS:
            continue
        try:
            status = os.statvfs(path)
        except OSError:
            continue  # we may not examine it, or it has been unmounted since
        free = status.f_bavail * status.f_frsize
        has_inodes = status.f_favail > 0 or not status.f_files
        is_writable = not status.f_flag & os.ST_RDONLY
        if status.f_blocks and is_writable and (free < _FULL_BYTES or not has_inodes):
            full.append((path, free, status.f_blocks * status.f_frsize))
    return full


def read_swap_used() -> int | None:
    total, free = read_meminfo_values("SwapTotal", "SwapFree")
    return None if total is None or free is None else total - free


def count_cores() -> int:
    """Return how many cores this process may use: by its affinity and by the cgroup's quota (a pod may have 8 of 128)."""
    return min([len(os.sched_getaffinity(0)), *_read_quotas(*find_cgroup_dirs("cpu"))])


def _read_quotas(folders: list[str], is_v2: bool) -> list[int]:
    """Return the CPU quota of each cgroup that has one, in cores, rounded up."""
    quotas = []
    for folder in folders:
        if is_v2:
            quota, _, period = read_kernel_file(f"{folder}/cpu.max").strip().partition(" ")
        else:
            quota = read_kernel_file(f"{folder}/cpu.cfs_quota_us").strip()
            period = read_kernel_file(f"{folder}/cpu.cfs_period_us").strip()
        if quota.isdigit() and period.isdigit() and int(period):
            quotas.append(max(1, -(-int(quota) // int(period))))
    return quotas


def read_max_processes() -> int | None:
    """Return the tightest of the kernel's, the user's and the cgroup's limits on processes."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limits = [
        read_number("/proc/sys/kernel/pid_max"),
        read_number("/sys/fs/cgroup/pids.max"),
        None if soft < 0 else soft,
    ]
    return min((limit for limit in limits if limit is not None), default=None)


def raise_files_limit() -> int:
    """Raise this process's soft limit on open files to the hard one. Return the old soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft


def read_max_files() -> int | None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if hard < 0 else hard


def find_nearby_cpus(pci: str) -> list[int]:
    """Return the CPUs near a PCI device, or [] if unknown. NVML's PCI address has 8 digits of domain, sysfs's has 4."""
    domain, _, rest = pci.lower().partition(":")
    text = read_kernel_file(f"/sys/bus/pci/devices/{domain[-4:]}:{rest}/local_cpulist").strip()
    ranges = (part.partition("-") for part in text.split(",") if part)
    return [cpu for low, _, high in ranges for cpu in range(int(low), int(high or low) + 1)]


def read_host_limits(runs_dir: str) -> examination.HostState:
    """Return the host's disk space and limits, which are quick to read. Fields about other processes keep their defaults."""
    disk = runs_dir
    while disk and not os.path.isdir(disk):
        disk = os.path.dirname(disk)
    status = os.statvfs(disk or ".")
    shm_free, shm_total = read_shm_space()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    return examination.HostState(
        shm_total=shm_total,
        shm_free=shm_free,
        disk_free=status.f_bavail * status.f_frsize,
        disk_path=disk or ".",
        files_soft=None if soft < 0 else soft,
        files_hard=None if hard < 0 else hard,
        address_space=None if address_space < 0 else address_space,
        swap_used=read_swap_used(),
        clock=time.time(),
    )
