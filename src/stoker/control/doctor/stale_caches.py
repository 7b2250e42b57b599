"""Finds data and compile caches and chooses which of them to remove. Only cleanup.py removes anything."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Mapping

from stoker.contract import layout
from stoker.contract.frozen import frozen
from stoker.contract.layout import cache_home
from stoker.contract.safe_io import read_text
from stoker.control.doctor.leftovers import AGENTS
from stoker.control.doctor.stale_files import find_paths_in_use, walk
from stoker.control.machine import procfs


@frozen
class Cache:
    kind: str  # data | compile | agent
    root: str
    path: str
    size: int
    idle: float  # seconds since anything in it was last read or written
    kept: str = ""  # why it must not be removed


_KEY = r"[0-9a-f]{32}(\..*)?"  # names of prepared data; other entries of such a folder are not ours


def _is_tagged(folder: str) -> bool:
    """Return whether a folder has our tag. Its name proves nothing: any folder may be called `cache`."""
    try:
        return read_text(os.path.join(folder, layout.CACHE_TAG)) == layout.CACHE_SIGNATURE
    except (OSError, ValueError):
        return False


def list_cache_roots(environment: Mapping[str, str], cwd: str) -> list[tuple[str, str, str]]:
    """Return (kind, folder, pattern of its entries) for each folder that can hold caches."""
    home = os.path.expanduser("~")
    user = re.sub(r'[\\/:*?"<>|]', "_", procfs.user_name(os.getuid()))  # as torch writes it
    data = [os.path.join(cwd, "cache")]
    if environment.get("STOKER_CACHE"):
        data.append(os.path.abspath(environment["STOKER_CACHE"]))
    data += [os.path.join(folder, layout.CACHE_INSIDE) for folder in data]
    return [
        *(("data", os.path.join(folder, "datasets"), _KEY) for folder in dict.fromkeys(data) if _is_tagged(folder)),
        ("compile", f"/tmp/torchinductor_{user}", ".*"),
        ("compile", os.path.join(home, ".triton", "cache"), ".*"),
        ("compile", os.path.join(cache_home(environment), "compile"), ".*"),
        ("agent", os.path.join(home, ".cache", "stoker"), r"agent-.*"),
    ]


def find_caches(roots: list[tuple[str, str, str]]) -> list[Cache]:
    """Return the caches in these folders. Skips links and others' folders: other users can create both in /tmp."""
    caches: list[Cache] = []
    own = [(kind, os.path.realpath(folder), pattern) for kind, folder, pattern in roots if is_own_folder(folder)]
    used = find_paths_in_use(tuple(folder + "/" for _, folder, _ in own)) if own else set()
    has_agents = any(process.name in AGENTS for process in procfs.list_processes())
    for kind, folder, pattern in own:
        try:
            device = os.lstat(folder).st_dev
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as problem:
            caches.append(Cache(kind, folder, folder, 0, 0.0, f"can't be read: {problem.strerror}"))
            continue
        for entry in entries:
            if re.fullmatch(pattern, entry.name):
                caches.append(_examine_cache(kind, folder, entry.path, device, used, has_agents))
    return caches


def is_own_folder(path: str) -> bool:
    """Return whether this is a real folder of this user, not a link."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _examine_cache(kind: str, root: str, path: str, device: int, used: set[str], has_agents: bool) -> Cache:
    size, last_used, kept = 0, 0.0, ""
    for name, status in walk(path):
        size += status.st_blocks * 512
        # Our own reading of a folder changes its access time, so only files count.
        accessed = 0.0 if stat.S_ISDIR(status.st_mode) else status.st_atime
        last_used = max(last_used, status.st_mtime, accessed)
        if status.st_dev != device:
            kept = kept or f"another file system is mounted at {name}"
        if status.st_uid != os.getuid():
            kept = kept or f"{name} is not yours"
    if os.path.islink(path):
        kept = "a symbolic link, not followed"
    elif any(name == path or name.startswith(path + "/") for name in used):
        kept = "in use"
    elif kind == "agent" and has_agents:
        kept = "an agent is running and may use it"
    return Cache(kind, root, path, size, max(0.0, time.time() - last_used), kept)


def choose_to_prune(caches: list[Cache], older_than: float | None, max_size: int | None) -> list[Cache]:
    """Return the caches that were idle too long, and then the most idle ones until the others fit in `max_size`."""
    removable = [cache for cache in caches if not cache.kept]
    chosen = [cache for cache in removable if older_than is not None and cache.idle >= older_than]
    if max_size is not None:
        total = sum(cache.size for cache in caches) - sum(cache.size for cache in chosen)
        for cache in sorted((cache for cache in removable if cache not in chosen), key=lambda cache: -cache.idle):
            if total <= max_size:
                break
            chosen.append(cache)
            total -= cache.size
    return chosen
