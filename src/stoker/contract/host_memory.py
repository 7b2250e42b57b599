"""Host memory that this process may use: the machine's, or its cgroup's where that is less, and a limit for one process."""

from __future__ import annotations

import os
import resource

from stoker.contract.process import kernel_lines, read_kernel_file


def meminfo_lines(*keys: str) -> list[int | None]:
    """These lines of /proc/meminfo, in bytes."""
    lines = (line.partition(":") for line in kernel_lines("/proc/meminfo"))
    found = {key: int(rest.split()[0]) * 1024 for key, _, rest in lines}
    return [found.get(key) for key in keys]


def read_meminfo() -> tuple[int, int]:
    """(total, available) bytes of the host."""
    total, available = meminfo_lines("MemTotal", "MemAvailable")
    assert total is not None
    return total, total if available is None else available


def cgroup_dirs(
    controller: str, root: str = "/sys/fs/cgroup", told: str = "/proc/self/cgroup"
) -> tuple[list[str], bool]:
    """(folders, is version 2) of this process's cgroup and those around it: a scheduler's limit is on the job."""
    lines = [line.split(":", 2) for line in kernel_lines(told)]
    # A controller of version 1 counts where it is mounted.
    for _, controllers, path in sorted(lines, key=lambda line: not line[1]):
        v2 = not controllers
        if not v2 and controller not in controllers.split(","):
            continue
        base = root if v2 else os.path.join(root, controller)
        if not os.path.isdir(base) or (v2 and not os.path.exists(f"{root}/cgroup.controllers")):
            continue
        parts = [part for part in path.split("/") if part]
        if ".." in parts:  # outside what this container sees
            parts = []
        folders = [os.path.join(base, *parts[:count]) for count in range(len(parts), -1, -1)]
        return [folder for folder in folders if os.path.isdir(folder)], v2
    return [], True


def read_number(path: str) -> int | None:
    text = read_kernel_file(path).strip()
    return int(text) if text.isdigit() else None


def cgroup_memory() -> tuple[int | None, int | None]:
    """(limit, used) of the memory cgroup; page cache that can be dropped does not count as used."""
    folders, v2 = cgroup_dirs("memory")
    limits = {
        folder: read_number(f"{folder}/memory.max" if v2 else f"{folder}/memory.limit_in_bytes") for folder in folders
    }
    limit, folder = min(
        ((limit, folder) for folder, limit in limits.items() if limit is not None and limit < 1 << 60),
        default=(None, ""),
    )
    if limit is None:
        return None, None
    used = read_number(f"{folder}/memory.current" if v2 else f"{folder}/memory.usage_in_bytes")
    if used is not None:
        stats = dict(line.split() for line in kernel_lines(f"{folder}/memory.stat"))
        # Where it says nothing, an over-estimate of "used" is the safe side.
        used -= int(stats.get("inactive_file" if v2 else "total_inactive_file", 0))
    return limit, used


def read_memory() -> tuple[int, int, int | None]:
    """(total, available, cgroup limit): what this process may count on."""
    total, available = read_meminfo()
    limit, used = cgroup_memory()
    if limit is not None and limit < total:
        return limit, max(0, min(available, limit - (used or 0))), limit
    return total, available, limit


def usable_memory() -> int:
    """Bytes that can still be taken before the kernel ends a process for it: with swap, where no cgroup limits us."""
    _, free, limit = read_memory()
    return free + (meminfo_lines("SwapFree")[0] or 0 if limit is None else 0)


_PAGE = os.sysconf("SC_PAGE_SIZE")


def used_memory() -> int:
    """Bytes, as RLIMIT_DATA counts them."""
    handle = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return int(os.read(handle, 200).split()[5]) * _PAGE
    finally:
        os.close(handle)


def limit_memory(size: int) -> None:
    """Of this process, from now on; never more than it may have already."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [size, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
