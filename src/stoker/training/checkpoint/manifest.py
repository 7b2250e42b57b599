"""A checkpoint's manifest.json: files with their checksums, and where each tensor's pieces lie. No torch."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
import stat
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from stoker.contract.frozen import as_json, frozen
from stoker.contract.progress import Progress
from stoker.contract.safe_io import file_kind
from stoker.contract.text import parse_json
from stoker.contract.typed_values import Count, read_frozen

SCHEMA = 1
NAME = "manifest.json"
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


@frozen
class Piece:
    """One block of a tensor, as one file holds it."""

    file: str
    key: str
    offset: tuple[Count, ...]
    shape: tuple[Count, ...]


@frozen
class Entry:
    """A whole tensor."""

    shape: tuple[Count, ...]
    dtype: str  # as safetensors spells it
    pieces: tuple[Piece, ...]


@frozen
class Sums:
    """A file's size, and the CRC-32 of each `chunk` bytes of it."""

    size: Count
    chunk: Count
    crc32: tuple[Count, ...]


@frozen
class Manifest:
    step: Count
    world: Count
    token: str
    files: dict[str, Sums]
    tensors: dict[str, Entry]
    meta: dict[str, Any]
    score: float | None = None


def encode(manifest: Manifest) -> bytes:
    body = {"schema": SCHEMA, **as_json(manifest)}
    return json.dumps({**body, "sha256": _digest(body)}, indent=1).encode()


def decode(data: bytes) -> Manifest:
    """Return the manifest. Raises ValueError, which says what is wrong with it."""
    body = parse_json(data)
    if not isinstance(body, dict):
        raise ValueError("it is not a JSON object")
    if body.get("schema") != SCHEMA:
        raise ValueError(f"its schema is {body.get('schema')!r}, this Stoker reads {SCHEMA}")
    if body.pop("sha256", None) != _digest(body):
        raise ValueError("its own checksum is wrong")
    del body["schema"]
    manifest = read_frozen(Manifest, body)
    check_files(manifest.files)
    problem = disagreement(manifest.files, manifest.tensors)
    if problem:
        raise ValueError(problem)
    return manifest


def check_files(files: Mapping[str, Sums]) -> None:
    for name, sums in files.items():
        if not _PLAIN.fullmatch(name):
            raise ValueError(f"{name!r} is not a plain file name inside the checkpoint's folder")
        size, chunk, count = sums.size, sums.chunk, len(sums.crc32)
        if chunk < 1 or count != -(-size // chunk):
            raise ValueError(f"{name}: {count} checksums for {size} bytes in chunks of {chunk}")


def disagreement(files: Mapping[str, Sums], tensors: Mapping[str, Entry]) -> str | None:
    """Return why the pieces of a tensor don't make the whole or lie in a file that is not listed; None if all fit."""
    for name, entry in tensors.items():
        for piece in entry.pieces:
            if piece.file not in files:
                return f"{name} is in {piece.file!r}, which is not among the files"
            if not len(piece.offset) == len(piece.shape) == len(entry.shape):
                return f"{name}: a piece has another number of dimensions"
            if any(
                start + size > whole for start, size, whole in zip(piece.offset, piece.shape, entry.shape, strict=True)
            ):
                return f"{name}: a piece is outside of shape {list(entry.shape)}"
        if sum(math.prod(piece.shape) for piece in entry.pieces) != math.prod(entry.shape):
            return f"{name}: its pieces do not make the whole tensor of shape {list(entry.shape)}"
        if _cut_along_one(entry.pieces):
            continue
        pairs = itertools.combinations(entry.pieces, 2)
        if any(not one.shape or overlap(one.offset, one.shape, two.offset, two.shape) for one, two in pairs):
            return f"{name}: its pieces do not make the whole tensor of shape {list(entry.shape)}"
    return None


def _cut_along_one(pieces: Sequence[Piece]) -> bool:
    """Along one dimension they lie one behind the other, as nearly always: none can meet another."""
    if len(pieces) < 2:
        return True
    for axis in range(len(pieces[0].shape)):
        ordered = sorted((piece.offset[axis], piece.shape[axis]) for piece in pieces)
        if all(start + size <= after for (start, size), (after, _) in itertools.pairwise(ordered)):
            return True
    return False


def overlap(
    offset: Sequence[int], shape: Sequence[int], other_offset: Sequence[int], other_shape: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Where two blocks meet: (start, stop) per dimension; None where they don't."""
    start = tuple(map(max, offset, other_offset))
    stop = tuple(min(a + n, b + m) for a, n, b, m in zip(offset, shape, other_offset, other_shape, strict=True))
    return (start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


CHUNK = 16 << 20


class SummedFile:
    """A new file, checksummed as it is written. `between` runs before each chunk and may raise."""

    def __init__(self, path: str, between: Callable[[int], None]) -> None:
        self.path = path
        self._between = between
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._size, self._crc, self._sums = 0, 0, list[int]()

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while len(view):
            self._between(self._fd)
            part = view[: CHUNK - self._size % CHUNK]
            self._crc = zlib.crc32(part, self._crc)
            self._write(part)
            self._size += len(part)
            view = view[len(part) :]
            if self._size % CHUNK == 0:
                self._sums.append(self._crc)
                self._crc = 0

    def _write(self, left: memoryview) -> None:
        try:
            while len(left):
                left = left[os.write(self._fd, left) :]
        except OSError as problem:
            raise OSError(problem.errno, problem.strerror, self.path) from problem  # a write knows no file's name

    def finish(self) -> Sums:
        try:
            os.fsync(self._fd)
        except OSError as problem:
            raise OSError(problem.errno, problem.strerror, self.path) from problem
        if self._size % CHUNK:
            self._sums.append(self._crc)
        return Sums(self._size, CHUNK, tuple(self._sums))

    def close(self) -> None:
        os.close(self._fd)


def wrong_in(folder: str, files: dict[str, Sums]) -> list[str]:
    """What is wrong with these files, one line each, in the order of the files; every byte is read."""
    problems = _wrong_sizes(folder, files)
    chunks = [(name, n) for name, sums in files.items() if problems[name] is None for n in range(len(sums.crc32))]
    threads = ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1), thread_name_prefix="checksum")
    with Progress("checking the checkpoint", len(chunks), unit="pieces") as progress, threads as pool:
        checked = pool.map(lambda chunk: _wrong_chunk(folder, chunk[0], files[chunk[0]], chunk[1]), chunks)
        for (name, _), problem in zip(chunks, checked, strict=True):
            problems[name] = problems[name] or problem
            progress.tick()
    return [f"{name} {problem}" for name, problem in problems.items() if problem]


def sizes_wrong_in(folder: str, files: dict[str, Sums]) -> list[str]:
    problems = _wrong_sizes(folder, files)
    return [f"{name} {problem}" for name, problem in problems.items() if problem]


def _wrong_sizes(folder: str, files: dict[str, Sums]) -> dict[str, str | None]:
    return {name: _wrong_size(folder, name, sums) for name, sums in files.items()}


def _wrong_size(folder: str, name: str, sums: Sums) -> str | None:
    path = os.path.join(folder, name)
    try:
        about = os.stat(path)
    except FileNotFoundError:
        return "is missing"
    except OSError as problem:
        return f"can't be read: {problem.strerror}"
    if not stat.S_ISREG(about.st_mode):
        return f"is {file_kind(about.st_mode)}, not a file"
    return None if about.st_size == sums.size else f"has {about.st_size} bytes instead of {sums.size}"


def _wrong_chunk(folder: str, name: str, sums: Sums, n: int) -> str | None:
    start, stop = n * sums.chunk, min((n + 1) * sums.chunk, sums.size)
    crc, at = 0, start
    try:
        fd = os.open(os.path.join(folder, name), os.O_RDONLY | os.O_CLOEXEC)
        try:
            while at < stop:
                data = os.pread(fd, min(stop - at, 4 << 20), at)
                if not data:
                    return f"ends at byte {at} instead of {sums.size}"
                crc = zlib.crc32(data, crc)
                at += len(data)
        finally:
            os.close(fd)
    except OSError as problem:
        return f"can't be read at byte {at}: {problem.strerror}"
    return None if crc == sums.crc32[n] else f"is damaged between bytes {start} and {stop} (checksum)"
