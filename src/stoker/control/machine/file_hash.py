"""sha256 of files, and a memory of the big ones: weights of 20 GB are read once, not at every start."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable

from stoker.contract.layout import cache_home
from stoker.contract.safe_io import open_regular, read_json, write_atomic
from stoker.contract.typed_values import read_value

_CHUNK = 1 << 20
_BIG = 4 << 20  # smaller ones are read faster than remembered
_RACY_NS = 2_000_000_000  # changed so recently that the next change may have the same time


Tick = Callable[[int], None]  # bytes that were read


def sha256_of(path: str) -> str:
    """Of a regular file: a named pipe would be waited for."""
    handle = open_regular(path)
    try:
        return _sha256(handle)
    finally:
        os.close(handle)


def _sha256(handle: int, tick: Tick | None = None) -> str:
    digest = hashlib.sha256()
    while data := os.read(handle, _CHUNK):
        digest.update(data)
        if tick is not None:
            tick(len(data))
    return digest.hexdigest()


class FileHashes:
    """By path; a remembered hash counts only while size, time and inode are the same."""

    def __init__(self, memory: str | None = None) -> None:
        self._memory = memory or os.path.join(cache_home(os.environ), "hashes.json")
        self._known: dict[str, tuple[int, int, int, str]] = {}
        self._changed = False
        # None yet, half a one, or something else: everything is read again.
        with contextlib.suppress(OSError, ValueError):
            self._known = read_value("dict[str, tuple[int, int, int, str]]", read_json(self._memory))

    def of(self, path: str, tick: Tick | None = None) -> str:
        """Return the hash of a regular file: the remembered one if it has not changed since. Raises OSError."""
        handle = open_regular(path)
        try:
            return self._of(handle, path, tick)
        finally:
            os.close(handle)

    def _of(self, handle: int, path: str, tick: Tick | None) -> str:
        seen = os.fstat(handle)
        if seen.st_size < _BIG:
            return _sha256(handle, tick)
        key, now = os.path.realpath(path), (seen.st_size, seen.st_mtime_ns, seen.st_ino)
        known = self._known.get(key)
        if known is not None and known[:3] == now:
            if tick is not None:
                tick(seen.st_size)
            return known[3]
        found = _sha256(handle, tick)
        again = os.fstat(handle)
        if (again.st_size, again.st_mtime_ns, again.st_ino) == now and time.time_ns() - seen.st_mtime_ns > _RACY_NS:
            self._known[key] = (*now, found)
            self._changed = True
        return found

    def save(self) -> None:
        """A memory that can't be kept (a full or read-only home) costs time, not the run."""
        if not self._changed:
            return
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(self._memory), mode=0o700, exist_ok=True)
            known = {path: one for path, one in self._known.items() if os.path.exists(path)}
            write_atomic(self._memory, json.dumps(known), durable=False)
