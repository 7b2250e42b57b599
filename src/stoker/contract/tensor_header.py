"""The header of a safetensors file, checked: which tensors lie where. Standard library: the launcher reads it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.contract.frozen import frozen
from stoker.contract.safe_io import open_regular
from stoker.contract.text import parse_json

BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F8_E8M0": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4, "C64": 64,
}  # fmt: skip


@frozen
class Tensor:
    """`begin` and `end` count from the file's start."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@frozen
class Header:
    tensors: dict[str, Tensor]
    metadata: dict[str, str]


def read_header(path: str) -> Header:
    """OSError: it can't be read; ValueError: it is no safetensors file, or a damaged one."""
    with os.fdopen(open_regular(path), "rb") as file:
        whole = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if whole < 8 or length > whole - 8:
            pull = "a git-lfs pointer becomes the file by `git lfs pull`"
            raise ValueError(f"{whole} bytes are not a complete safetensors file; {pull}")
        found = parse_json(file.read(length))
    if not isinstance(found, dict):
        raise ValueError("its header holds no tensors by name")
    about = found.pop("__metadata__", None) or {}
    if not isinstance(about, dict) or not all(isinstance(value, str) for value in about.values()):
        raise ValueError("its __metadata__ is not text by name")
    return Header({name: _tensor(name, entry, 8 + length, whole) for name, entry in found.items()}, about)


def pack_header(tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str]) -> bytes:
    """What a file begins with that holds these (dtype, shape), one behind the other: its length, and JSON padded to 8."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, sizes) in tensors.items():
        begin, end = end, end + math.prod(sizes) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(sizes), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _tensor(name: str, entry: Any, start: int, whole: int) -> Tensor:
    if not isinstance(entry, dict):
        raise ValueError(f"{name} is not described")
    dtype, sizes, offsets = (entry.get(key, "nothing") for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"{name} has the unknown dtype {str(dtype)[:40]!r}")
    if not _counts(sizes) or not _counts(offsets) or len(offsets) != 2:
        raise ValueError(f"{name} has the shape {str(sizes)[:80]} and the data_offsets {str(offsets)[:80]}")
    begin, end = offsets
    if begin > end or math.prod(sizes) * BITS[dtype] != 8 * (end - begin):
        raise ValueError(f"{name}: {dtype} of shape {sizes} does not fill the bytes {begin} to {end}")
    if start + end > whole:
        raise ValueError(f"it is cut off: it ends after {whole} bytes, and {start + end} are promised")
    return Tensor(dtype, tuple(sizes), start + begin, start + end)


def _counts(value: Any) -> bool:
    """Return whether this is a list of whole numbers from 0 up."""
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)
