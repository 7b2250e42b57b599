"""The host's memory and limits, the cgroup's where it is tighter."""

from __future__ import annotations

import os
import resource


def meminfo() -> tuple[int, int]:
    """(total, available) bytes of the host."""
    found = {}
    with open("/proc/meminfo", "rb") as file:
        for line in file:
            key, _, rest = line.partition(b":")
            if key in (b"MemTotal", b"MemAvailable"):
                found[key] = int(rest.split()[0]) * 1024
    return found[b"MemTotal"], found.get(b"MemAvailable", found[b"MemTotal"])


def _cgroup_dir() -> tuple[str, bool] | None:
    """(folder, is version 2) of the memory cgroup this process is in. In a container the root is the container's own."""
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            lines = [line.strip().split(":", 2) for line in file]
    except OSError:
        return None
    for _, controllers, path in lines:
        if not controllers:
            for folder in (f"/sys/fs/cgroup{path}", "/sys/fs/cgroup"):
                if os.path.exists(f"{folder}/memory.max"):
                    return folder, True
        elif "memory" in controllers.split(","):
            for folder in (f"/sys/fs/cgroup/memory{path}", "/sys/fs/cgroup/memory"):
                if os.path.exists(f"{folder}/memory.limit_in_bytes"):
                    return folder, False
    return None


def _number(path: str) -> int | None:
    try:
        with open(path, encoding="ascii") as file:
            text = file.read().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def cgroup_memory() -> tuple[int | None, int | None]:
    """(limit, used) of the memory cgroup; page cache that can be dropped does not count as used."""
    where = _cgroup_dir()
    if where is None:
        return None, None
    folder, v2 = where
    limit = _number(f"{folder}/memory.max" if v2 else f"{folder}/memory.limit_in_bytes")
    if limit is None or limit >= 1 << 60:
        return None, None
    used = _number(f"{folder}/memory.current" if v2 else f"{folder}/memory.usage_in_bytes")
    if used is not None:
        try:
            with open(f"{folder}/memory.stat", encoding="ascii") as file:
                stats = dict(line.split() for line in file)
            used -= int(stats.get("inactive_file" if v2 else "total_inactive_file", 0))
        except (OSError, ValueError):
            pass  # an over-estimate of "used" is the safe side
    return limit, used


def memory() -> tuple[int, int, int | None]:
    """(total, available, cgroup limit): what this process may count on."""
    total, available = meminfo()
    limit, used = cgroup_memory()
    if limit is not None and limit < total:
        return limit, max(0, min(available, limit - (used or 0))), limit
    return total, available, limit


def oom_kills() -> int | None:
    """How often the kernel's OOM killer has struck in this cgroup."""
    where = _cgroup_dir()
    if where is None:
        return None
    try:
        with open(f"{where[0]}/{'memory.events' if where[1] else 'memory.oom_control'}", encoding="ascii") as file:
            for line in file:
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    except OSError:
        return None
    return None


def shared_memory() -> tuple[int | None, int | None]:
    """(free, total) bytes of /dev/shm."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None, None
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize


def swap_used() -> int | None:
    found = {}
    with open("/proc/meminfo", "rb") as file:
        for line in file:
            key, _, rest = line.partition(b":")
            if key in (b"SwapTotal", b"SwapFree"):
                found[key] = int(rest.split()[0]) * 1024
    return found[b"SwapTotal"] - found[b"SwapFree"] if len(found) == 2 else None


def cores() -> int:
    return len(os.sched_getaffinity(0))


def max_processes() -> int | None:
    """The tightest of the kernel's, the user's and the cgroup's limits."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limits = [_number("/proc/sys/kernel/pid_max"), _number("/sys/fs/cgroup/pids.max"), None if soft < 0 else soft]
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
    """The CPUs on the NUMA node of a PCI device (NVML's bus id has eight digits of domain, sysfs four); empty if the kernel does not say."""
    domain, _, rest = pci.lower().partition(":")
    try:
        with open(f"/sys/bus/pci/devices/{domain[-4:]}:{rest}/local_cpulist", encoding="ascii") as file:
            words = file.read().strip().split(",")
    except OSError:
        return []
    ranges = (word.partition("-") for word in words if word)
    return [cpu for low, dash, high in ranges for cpu in range(int(low), int(high or low) + 1)]
