"""Digests of the sources' bytes, remembered by what `stat` says: a second call reads no data.

A file's digest is the SHA-256 of the SHA-256s of its 32 MB blocks, so that one big file is hashed by all cores.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from stoker.contract.names import EX_CANTCREAT, Refusal
from stoker.contract.untrusted import open_lock_file, read_json
from stoker.contract.wholefile import write_json

BLOCK = 32 << 20
SCHEMA = 1
SETTLED_NS = (
    2_000_000_000  # a file changed just now may change again within the clock's grain: its digest is not remembered
)


def _stat(path: str) -> list[int]:
    found = os.stat(path)
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def digest_files(paths: Sequence[str], cache: str, workers: int, say: Callable[[str], None]) -> list[str]:
    index = os.path.join(cache, "digests.json")
    known = _read(index)
    stats = {path: _stat(path) for path in paths}
    fresh = [path for path in stats if known.get(os.path.abspath(path), [None])[0] != stats[path]]
    found = {path: str(known[os.path.abspath(path)][1]) for path in stats if path not in fresh}
    total = sum(stats[path][0] for path in fresh)
    if total > 1 << 30:
        say(f"reading {total / 1e9:.1f} GB to know them by their bytes")
    now = time.time_ns()
    blocks = [(path, begin) for path in fresh for begin in range(0, max(stats[path][0], 1), BLOCK)]
    with ThreadPoolExecutor(max(1, workers)) as pool:
        sums = list(pool.map(_block, blocks))
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
    with open(path, "rb") as file:
        file.seek(begin)
        left = BLOCK
        while left and (data := file.read(min(left, 1 << 20))):
            whole.update(data)
            left -= len(data)
    return whole.digest()


def _read(index: str) -> dict[str, list[object]]:
    try:
        told = read_json(index, 1 << 30)  # a line for each of a million files
    except (FileNotFoundError, ValueError):
        return {}  # it only saves reading: what it held is found again
    return told["files"] if isinstance(told, dict) and told.get("schema") == SCHEMA else {}


def _remember(index: str, settled: dict[str, list[object]]) -> None:
    os.makedirs(os.path.dirname(index) or ".", exist_ok=True)
    try:
        handle = open_lock_file(index + ".lock")  # a link there would lead to a file elsewhere
    except OSError as problem:
        line = f"the lock file {index}.lock can't be used: {problem.strerror}; remove it"
        raise Refusal(line, EX_CANTCREAT) from problem
    with os.fdopen(handle, "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        write_json(index, {"schema": SCHEMA, "files": {**_read(index), **settled}})
