"""A checkpoint's manifest.json: files with their checksums, and where each tensor's pieces lie. No torch."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.contract.shape import as_json, shape
from stoker.contract.untrusted import parse_json

SCHEMA = 1
NAME = "manifest.json"
MOST_DIMENSIONS = 64
LARGEST = 512 << 20  # bytes of it
_MOST_VALUES = 8_000_000  # some 20 for each tensor's piece on each rank: 1,500 tensors on 256 ranks
_MOST_PAIRS = 1_000_000  # of pieces that are compared, of all tensors together: 3 s
_FEW_SUMS, _SMALL_CHUNK = 4096, 1 << 20  # a file in smaller chunks than that has at most so many
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


@shape
class Piece:
    """One block of a tensor, as one file holds it."""

    file: str
    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@shape
class Entry:
    """A whole tensor."""

    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it
    pieces: tuple[Piece, ...]


@shape
class Sums:
    """A file's size, and the CRC-32 of each `chunk` bytes of it."""

    size: int
    chunk: int
    crc32: tuple[int, ...]


@shape
class Manifest:
    step: int
    world: int
    token: str
    files: dict[str, Sums]
    tensors: dict[str, Entry]
    meta: dict[str, Any]
    score: float | None = None


def encode(manifest: Manifest) -> bytes:
    body = {"schema": SCHEMA, **as_json(manifest)}
    return json.dumps({**body, "sha256": _digest(body)}, indent=1).encode()


def decode(data: bytes) -> Manifest:
    """Trusts nothing in it: ValueError says what is wrong."""
    if not data.isascii():  # what `encode` never writes, and four bytes a character to read
        raise ValueError("it is not in ASCII")
    body = parse_json(data, most=_MOST_VALUES)
    if not isinstance(body, dict):
        raise ValueError("it is not a JSON object")
    if body.get("schema") != SCHEMA:
        raise ValueError(f"its schema is {body.get('schema')!r}, this Stoker reads {SCHEMA}")
    if body.pop("sha256", None) != _digest(body):
        raise ValueError("its own checksum is wrong")
    score = body.get("score")
    if score is not None and not isinstance(score, (int, float)):
        raise ValueError(f"score is {score!r}")
    manifest = Manifest(
        step=_count(body.get("step"), "step"),
        world=_count(body.get("world"), "world"),
        token=str(body.get("token")),
        files=decode_files(body.get("files")),
        tensors=decode_tensors(body.get("tensors")),
        meta=_mapping(body.get("meta"), "meta"),
        score=score,
    )
    problem = disagreement(manifest.files, manifest.tensors)
    if problem:
        raise ValueError(problem)
    return manifest


def decode_files(found: object) -> dict[str, Sums]:
    files: dict[str, Sums] = {}
    for name, sums in _mapping(found, "files").items():
        if not _PLAIN.fullmatch(name):
            raise ValueError(f"{name!r} is not a plain file name inside the checkpoint's folder")
        sums = _mapping(sums, name)
        size, chunk = _count(sums.get("size"), f"{name}: size"), _count(sums.get("chunk"), f"{name}: chunk")
        crc32 = _counts(sums.get("crc32"), f"{name}: crc32")
        if chunk < 1 or len(crc32) != -(-size // chunk) or (chunk < _SMALL_CHUNK and len(crc32) > _FEW_SUMS):
            raise ValueError(f"{name}: {len(crc32)} checksums for {size} bytes in chunks of {chunk}")
        files[name] = Sums(size, chunk, crc32)
    return files


def decode_tensors(found: object) -> dict[str, Entry]:
    tensors: dict[str, Entry] = {}
    for name, entry in _mapping(found, "tensors").items():
        entry = _mapping(entry, name)
        pieces = entry.get("pieces")
        if not isinstance(pieces, list):
            raise ValueError(f"{name}: pieces is {pieces!r}")
        tensors[name] = Entry(
            _counts(entry.get("shape"), f"{name}: shape"),
            str(entry.get("dtype")),
            tuple(_piece(_mapping(piece, name), name) for piece in pieces),
        )
    return tensors


def _piece(found: Mapping[str, Any], name: str) -> Piece:
    return Piece(
        str(found.get("file")),
        str(found.get("key")),
        _counts(found.get("offset"), f"{name}: offset"),
        _counts(found.get("shape"), f"{name}: shape"),
    )


def disagreement(files: Mapping[str, Sums], tensors: Mapping[str, Entry]) -> str | None:
    """A tensor whose pieces do not make exactly the whole, or lie in a file that is not listed."""
    left = _MOST_PAIRS
    for name, entry in tensors.items():
        for piece in entry.pieces:
            if piece.file not in files:
                return f"{name} lies in {piece.file!r}, which is not among the files"
            if not len(piece.offset) == len(piece.shape) == len(entry.shape):
                return f"{name}: a piece has another number of dimensions"
            if any(
                start + size > whole for start, size, whole in zip(piece.offset, piece.shape, entry.shape, strict=True)
            ):
                return f"{name}: a piece lies outside of shape {list(entry.shape)}"
        if len(entry.shape) > MOST_DIMENSIONS:
            return f"{name} has {len(entry.shape)} dimensions"
        if sum(math.prod(piece.shape) for piece in entry.pieces) != math.prod(entry.shape):
            return f"{name}: its pieces do not make the whole tensor of shape {list(entry.shape)}"
        if _cut_along_one(entry.pieces):
            continue
        left -= len(entry.pieces) ** 2 // 2
        if left < 0:
            return f"{name} and others are cut into too many pieces along several dimensions"
        if _overlap(entry.pieces):
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


def _overlap(pieces: Sequence[Piece]) -> bool:
    return any(
        not one.shape or overlap(one.offset, one.shape, two.offset, two.shape)
        for one, two in itertools.combinations(pieces, 2)
    )


def overlap(
    offset: Sequence[int], shape: Sequence[int], other_offset: Sequence[int], other_shape: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Where two blocks meet: (start, stop) per dimension; None where they don't."""
    start = tuple(map(max, offset, other_offset))
    stop = tuple(min(a + n, b + m) for a, n, b, m in zip(offset, shape, other_offset, other_shape, strict=True))
    return (start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _mapping(found: object, what: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ValueError(f"{what} is {str(found)[:80]!r}")
    return found


def _count(found: object, what: str) -> int:
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise ValueError(f"{what} is {str(found)[:80]!r}")
    return found


def _counts(found: object, what: str) -> tuple[int, ...]:
    if not isinstance(found, list):
        raise ValueError(f"{what} is {str(found)[:80]!r}")
    return tuple(_count(one, what) for one in found)
