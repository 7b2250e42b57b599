"""Computes SHA-256 hashes of files and caches those of big ones: weights of 20 GB are read once, not at every start."""

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
_MIN_CACHED = 4 << 20  # bytes; reading a smaller file is faster than a look-up
_RECENT_NS = 2_000_000_000  # a file that has just changed may change again without a new time stamp


OnRead = Callable[[int], None]  # gets the number of bytes that were read


def sha256_of(path: str) -> str:
    """Return the hash of a regular file. Raises OSError for any other file; a named pipe would block."""
    fd = open_regular(path)
    try:
        return _sha256(fd)
    finally:
        os.close(fd)


def _sha256(fd: int, on_read: OnRead | None = None) -> str:
    digest = hashlib.sha256()
    while data := os.read(fd, _CHUNK):
        digest.update(data)
        if on_read is not None:
            on_read(len(data))
    return digest.hexdigest()


class FileHashes:
    """Hashes of files by path, cached on disk. A cached hash counts while size, time and inode are the same."""

    def __init__(self, cache_file: str | None = None) -> None:
        self._cache_file = cache_file or os.path.join(cache_home(os.environ), "hashes.json")
        self._cache: dict[str, tuple[int, int, int, str]] = {}  # real path -> (size, time in ns, inode, hash)
        self._is_changed = False
        # If the cache is missing or damaged, everything is read again.
        with contextlib.suppress(OSError, ValueError):
            self._cache = read_value("dict[str, tuple[int, int, int, str]]", read_json(self._cache_file))

    def of(self, path: str, on_read: OnRead | None = None) -> str:
        """Return the hash of a regular file: the cached one if the file has not changed since. Raises OSError."""
        fd = open_regular(path)
        try:
            status = os.fstat(fd)
            if status.st_size < _MIN_CACHED:
                return _sha256(fd, on_read)
            key, identity = os.path.realpath(path), _identity(status)
            cached = self._cache.get(key)
            if cached is not None and cached[:3] == identity:
                if on_read is not None:
                    on_read(status.st_size)
                return cached[3]
            digest = _sha256(fd, on_read)
            is_recent = time.time_ns() - status.st_mtime_ns <= _RECENT_NS
            if _identity(os.fstat(fd)) == identity and not is_recent:
                self._cache[key] = (*identity, digest)
                self._is_changed = True
            return digest
        finally:
            os.close(fd)

    def save(self) -> None:
        """Write the cache. If that fails (a full or read-only home), the next run reads the files again."""
        if not self._is_changed:
            return
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(self._cache_file), mode=0o700, exist_ok=True)
            existing = {path: entry for path, entry in self._cache.items() if os.path.exists(path)}
            write_atomic(self._cache_file, json.dumps(existing), durable=False)


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ino
