"""Host memory that this process may use: the machine's, or its cgroup's if that is less. Also limits a process."""

from __future__ import annotations

import os
import resource

from stoker.contract.process import read_kernel_file, read_kernel_lines

_PAGE = os.sysconf("SC_PAGE_SIZE")


def read_meminfo_values(*keys: str) -> list[int | None]:
    """Return the bytes under these keys of /proc/meminfo, with None for a missing key."""
    lines = (line.partition(":") for line in read_kernel_lines("/proc/meminfo"))
    sizes = {key: int(value.split()[0]) * 1024 for key, _, value in lines}
    return [sizes.get(key) for key in keys]


def read_meminfo() -> tuple[int, int]:
    """Return (total, available) bytes of the host."""
    total, available = read_meminfo_values("MemTotal", "MemAvailable")
    assert total is not None
    return total, total if available is None else available


def find_cgroup_dirs(
    controller: str, root: str = "/sys/fs/cgroup", cgroup_file: str = "/proc/self/cgroup"
) -> tuple[list[str], bool]:
    """Return the folders of this process's cgroup and its parents, innermost first, and whether it is version 2.

    The parents count because a scheduler limits the whole job.
    """
    lines = [line.split(":", 2) for line in read_kernel_lines(cgroup_file)]
    # Version 1 lines first: a controller of version 1 counts if it is mounted.
    for _, controllers, path in sorted(lines, key=lambda line: not line[1]):
        is_v2 = not controllers
        if not is_v2 and controller not in controllers.split(","):
            continue
        base = root if is_v2 else os.path.join(root, controller)
        if not os.path.isdir(base) or (is_v2 and not os.path.exists(f"{root}/cgroup.controllers")):
            continue
        parts = [part for part in path.split("/") if part]
        if ".." in parts:  # the path leads out of what this container can see
            parts = []
        dirs = [os.path.join(base, *parts[:depth]) for depth in range(len(parts), -1, -1)]
        return [path for path in dirs if os.path.isdir(path)], is_v2
    return [], True


def read_number(path: str) -> int | None:
    text = read_kernel_file(path).strip()
    return int(text) if text.isdigit() else None


def read_cgroup_memory() -> tuple[int | None, int | None]:
    """Return (limit, used) bytes of the memory cgroup, without droppable page cache, or (None, None) if there is no limit."""
    dirs, is_v2 = find_cgroup_dirs("memory")
    limit_file, used_file, cache_key = (
        ("memory.max", "memory.current", "inactive_file")
        if is_v2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    limits = [(read_number(f"{path}/{limit_file}"), path) for path in dirs]
    finite = [(limit, path) for limit, path in limits if limit is not None and limit < 1 << 60]
    if not finite:
        return None, None
    limit, path = min(finite)
    used = read_number(f"{path}/{used_file}")
    if used is not None:
        stats = dict(line.split() for line in read_kernel_lines(f"{path}/memory.stat"))
        # If the key is missing, `used` is too high, which is the safe side.
        used -= int(stats.get(cache_key, 0))
    return limit, used


def read_memory() -> tuple[int, int, int | None]:
    """Return (total, available, cgroup limit) bytes that this process can use."""
    total, available = read_meminfo()
    limit, used = read_cgroup_memory()
    if limit is not None and limit < total:
        return limit, max(0, min(available, limit - (used or 0))), limit
    return total, available, limit


def read_usable_memory() -> int:
    """Return the bytes that can be taken before the kernel kills a process, with swap unless a cgroup limits us."""
    _, available, limit = read_memory()
    return available + (read_meminfo_values("SwapFree")[0] or 0 if limit is None else 0)


def read_used_memory() -> int:
    """Return the bytes that this process uses, as RLIMIT_DATA counts them."""
    fd = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return int(os.read(fd, 200).split()[5]) * _PAGE
    finally:
        os.close(fd)


def limit_memory(size: int) -> None:
    """Limit the memory of this process from now on; never raises an existing limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [size, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
