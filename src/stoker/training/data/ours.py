"""Stoker's own folders, which are nobody's data, and digests of sources, remembered by what `stat` says."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from stoker.contract import layout, typed_values
from stoker.contract.errors import EX_CANTCREAT, Refusal
from stoker.contract.progress import BYTES, Progress
from stoker.contract.safe_io import open_lock_file, open_regular, read_json, why_shared, write_atomic, write_json
from stoker.contract.units import format_bytes
from stoker.control.record import private_folders

TAG = layout.CACHE_TAG
OTHER_CACHE = "--data.cache names another place"
# What we put into a cache.
_OWN, _OWN_BEGIN = ("datasets", "hub", "tokenizers", "unpacked"), (TAG, "checked-rows.json", "digests.json", "user-")
_MARKS = (TAG, layout.RUN, "chain.json")


def tag(cache: str) -> None:
    """Marks the cache as one."""
    os.makedirs(cache, 0o700, exist_ok=True)
    path = os.path.join(cache, TAG)
    if not os.path.lexists(path):
        write_atomic(path, layout.CACHE_SIGNATURE, durable=False)


def own_cache(cache: str, say: Callable[[str], None]) -> str:
    """The cache where only we can write to it, else a folder of our own in it: nothing of others is used."""
    try:
        problem = why_shared(cache)
    except FileNotFoundError:
        if os.path.islink(cache):  # whoever made the link could put a folder there at any time
            line = f"data.cache {cache} is a link to {os.readlink(cache)}, which does not exist: create it, or remove the link"
            raise Refusal(line, EX_CANTCREAT) from None
        return _made(cache, say)
    if not problem:
        return cache if _is_cache(cache) else _inside(cache, say)
    if why_shared(cache, sticky=True):  # who owns the folder can exchange everything in it
        own = private_folders.private_cache("data", say)
    else:
        own = private_folders.own_folder(cache, f"user-{os.geteuid()}")
        os.makedirs(own, 0o700, exist_ok=True)
        if private_folders.own_folder(cache, f"user-{os.geteuid()}") != own:  # somebody was quicker
            return own_cache(cache, say)
    say(f"data.cache {cache}: {problem}; yours is {own}")
    return own


def _is_cache(folder: str) -> bool:
    """Or becomes one: it holds nothing else. Backups leave out what is marked as a cache, and a config file may name any folder."""
    names = os.listdir(folder)
    return TAG in names or all(name in _OWN or name.startswith(_OWN_BEGIN) for name in names)


def _inside(folder: str, say: Callable[[str], None]) -> str:
    cache = os.path.join(folder, layout.CACHE_INSIDE)
    say(f"data.cache {folder} holds other things, too: using {cache}")
    return own_cache(cache, say)


def _made(cache: str, say: Callable[[str], None]) -> str:
    """Made before anything is read from it, and then checked as any other: somebody may have been quicker."""
    parent = os.path.dirname(os.path.abspath(cache))
    try:
        os.makedirs(parent, exist_ok=True)
        os.mkdir(cache, 0o700)  # what it holds was made of files that others may not read
    except FileExistsError:
        pass
    except OSError as problem:
        if problem.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        own = private_folders.private_cache("data", say)
        say(f"data.cache {cache} can't be made ({problem.strerror}); yours is {own}")
        return own
    return own_cache(cache, say)


def files_below(folder: str, say: Callable[[str], None]) -> Iterator[str]:
    """Sorted by folder; without hidden ones and Stoker's own, runs and caches, unless `folder` itself is one."""
    ours = []
    for place, folders, names in os.walk(folder):
        if place != folder and any(mark in names for mark in _MARKS):
            ours.append(place)
            folders[:] = []
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (os.path.join(place, name) for name in sorted(names) if not name.startswith("."))
    if ours:
        say(
            "left out, because they are Stoker's own files:"
            f" {', '.join(ours[:3])}{f' and {len(ours) - 3} more' if len(ours) > 3 else ''}"
        )


BLOCK = 32 << 20
SCHEMA = 1
LOCK_S = 10.0
_FILES = "dict[str, tuple[list[int], str]]"
# A file changed just now may change again within the clock's grain: its digest is not remembered.
SETTLED_NS = 2_000_000_000


def _stat(path: str) -> list[int]:
    found = os.stat(path)
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def digest_files(paths: Sequence[str], cache: str, workers: int, say: Callable[[str], None]) -> list[str]:
    """Each is the SHA-256 of the SHA-256s of 32 MB blocks, so that one big file is hashed by all cores."""
    index = os.path.join(cache, "digests.json")
    known = _read(index)
    stats = {path: _stat(path) for path in paths}
    fresh = [path for path in stats if known.get(os.path.abspath(path), [None])[0] != stats[path]]
    found = {path: str(known[os.path.abspath(path)][1]) for path in stats if path not in fresh}
    total = sum(stats[path][0] for path in fresh)
    if total > 1 << 30:
        say(f"hashing {format_bytes(total)} of input")
    now = time.time_ns()
    blocks = [(path, begin) for path in fresh for begin in range(0, max(stats[path][0], 1), BLOCK)]
    sums = []
    with Progress("hashing", total, unit=BYTES) as progress, ThreadPoolExecutor(max(1, workers)) as pool:
        for (path, begin), one in zip(blocks, pool.map(_block, blocks), strict=True):
            sums.append(one)
            progress.tick(min(BLOCK, stats[path][0] - begin))
    wholes = {path: hashlib.sha256() for path in fresh}
    for one, (path, _) in zip(sums, blocks, strict=True):
        wholes[path].update(one)
    found.update({path: whole.hexdigest() for path, whole in wholes.items()})
    settled: dict[str, list[object]] = {
        os.path.abspath(path): [stats[path], found[path]] for path in fresh if stats[path][1] < now - SETTLED_NS
    }
    if settled:
        _remember(index, settled)
    return [found[path] for path in paths]


def _block(block: tuple[str, int]) -> bytes:
    path, begin = block
    whole = hashlib.sha256()
    with os.fdopen(open_regular(path), "rb") as file:
        file.seek(begin)
        left = BLOCK
        while left and (data := file.read(min(left, 1 << 20))):
            whole.update(data)
            left -= len(data)
    return whole.digest()


def _read(index: str) -> dict[str, list[object]]:
    try:
        told = read_json(index)
        files: dict[str, list[object]] = typed_values.read_fields({"schema": "int", "files": _FILES}, told)["files"]
    except (OSError, ValueError):
        return {}  # it only saves reading: what it held is found again
    return files if told["schema"] == SCHEMA else {}


def _remember(index: str, settled: dict[str, list[object]]) -> None:
    os.makedirs(os.path.dirname(index) or ".", exist_ok=True)
    try:
        handle = open_lock_file(index + ".lock")  # a link there would lead to a file elsewhere
    except OSError as problem:
        line = f"the lock file {index}.lock can't be used: {problem.strerror}; remove it"
        raise Refusal(line, EX_CANTCREAT) from problem
    with os.fdopen(handle, "rb") as lock:
        deadline = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    return  # the index only saves reading: these files are hashed again next time
                time.sleep(0.05)
        write_json(index, {"schema": SCHEMA, "files": {**_read(index), **settled}})
