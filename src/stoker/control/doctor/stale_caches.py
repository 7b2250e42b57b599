"""Finding data and compile caches, and choosing which of them may go. Looks only; clean.py acts."""

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
from stoker.control.doctor.stale_files import paths_in_use, walk
from stoker.control.machine import procfs


@frozen
class Cache:
    kind: str  # data | compile | agent
    root: str
    path: str
    size: int
    idle: float  # seconds since anything in it was last read or written
    kept: str = ""  # why it must not be pruned


_KEY = r"[0-9a-f]{32}(\..*)?"  # what prepared data is called: nothing else in such a folder is ours


def _is_tagged(folder: str) -> bool:
    """Return whether a folder has our tag: any folder may be called `cache`."""
    try:
        return read_text(os.path.join(folder, layout.CACHE_TAG)) == layout.CACHE_SIGNATURE
    except (OSError, ValueError):
        return False


def cache_roots(environment: Mapping[str, str], cwd: str) -> list[tuple[str, str, str]]:
    """(kind, folder, pattern of the entries in it)."""
    home = os.path.expanduser("~")
    user = re.sub(r'[\\/:*?"<>|]', "_", procfs.user_name(os.getuid()))  # torch spells it so
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
    """Return what is in these folders. Each must be a real folder of this user's: other users can create links in /tmp."""
    found: list[Cache] = []
    real = [(kind, os.path.realpath(folder), pattern) for kind, folder, pattern in roots if own_folder(folder)]
    used = paths_in_use(tuple(folder + "/" for _, folder, _ in real)) if real else set()
    agents = any(one.name in AGENTS for one in procfs.all_processes())
    for kind, folder, pattern in real:
        try:
            device = os.lstat(folder).st_dev
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as problem:
            found.append(Cache(kind, folder, folder, 0, 0.0, f"can't be read: {problem.strerror}"))
            continue
        for entry in entries:
            if re.fullmatch(pattern, entry.name):
                found.append(_cache(kind, folder, entry.path, device, used, agents))
    return found


def own_folder(path: str) -> bool:
    try:
        about = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid()


def _cache(kind: str, root: str, path: str, device: int, used: set[str], agents: bool) -> Cache:
    size, last, kept = 0, 0.0, ""
    for name, about in walk(path):
        size += about.st_blocks * 512
        # Reading a folder touches its access time, and we have just read it: a file's alone says that somebody used it.
        last = max(last, about.st_mtime, 0.0 if stat.S_ISDIR(about.st_mode) else about.st_atime)
        if about.st_dev != device:
            kept = kept or f"another file system is mounted at {name}"
        if about.st_uid != os.getuid():
            kept = kept or f"{name} is not yours"
    if os.path.islink(path):
        kept = "a symbolic link, not followed"
    elif any(one == path or one.startswith(path + "/") for one in used):
        kept = "in use"
    elif kind == "agent" and agents:
        kept = "an agent is running, perhaps from here"
    return Cache(kind, root, path, size, max(0.0, time.time() - last), kept)


def choose_to_prune(caches: list[Cache], older_than: float | None, max_size: int | None) -> list[Cache]:
    """What has been idle too long; then, while all together are too large, what has been idle longest."""
    free = [one for one in caches if not one.kept]
    chosen = [one for one in free if older_than is not None and one.idle >= older_than]
    if max_size is not None:
        total = sum(one.size for one in caches) - sum(one.size for one in chosen)
        for one in sorted((one for one in free if one not in chosen), key=lambda one: -one.idle):
            if total <= max_size:
                break
            chosen.append(one)
            total -= one.size
    return chosen
