"""Reads, checks and writes the header of a safetensors file, which says where its tensors are. Uses no torch."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.contract.frozen import frozen
from stoker.contract.safe_io import open_regular
from stoker.contract.text import parse_json

_DTYPES_BY_BITS = {
    64: "F64 I64 U64 C64",
    32: "F32 I32 U32",
    16: "F16 BF16 I16 U16",
    8: "I8 U8 BOOL F8_E4M3 F8_E5M2 F8_E4M3FNUZ F8_E5M2FNUZ F8_E8M0",
    6: "F6_E2M3 F6_E3M2",
    4: "F4",
}
BITS = {dtype: bits for bits, dtypes in _DTYPES_BY_BITS.items() for dtype in dtypes.split()}


@frozen
class Tensor:
    """The location of a tensor. `begin` and `end` count bytes from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@frozen
class Header:
    tensors: dict[str, Tensor]
    metadata: dict[str, str]


def read_header(path: str) -> Header:
    """Return the checked header of a file. Raises OSError, or ValueError if it is damaged or not a safetensors file."""
    with os.fdopen(open_regular(path), "rb") as file:
        file_size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if file_size < 8 or length > file_size - 8:
            pull = "if it is a git-lfs pointer, `git lfs pull` downloads the file"
            raise ValueError(f"{file_size} bytes are not a complete safetensors file; {pull}")
        header = parse_json(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("a value in its __metadata__ is not text")
    tensors = {name: _read_tensor(name, entry, 8 + length, file_size) for name, entry in header.items()}
    return Header(tensors, metadata)


def pack_header(tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str]) -> bytes:
    """Return the first bytes of a file with these tensors (dtype, shape), one after another: the length and the padded JSON."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _read_tensor(name: str, entry: Any, data_start: int, file_size: int) -> Tensor:
    if not isinstance(entry, dict):
        raise ValueError(f"the entry of {name} is not a JSON object")
    dtype, shape, offsets = (entry.get(key, "nothing") for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"{name} has the unknown dtype {str(dtype)[:40]!r}")
    if not _is_list_of_counts(shape) or not _is_list_of_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"{name} has an impossible shape {str(shape)[:80]} or data_offsets {str(offsets)[:80]}")
    begin, end = offsets
    if begin > end or math.prod(shape) * BITS[dtype] != 8 * (end - begin):
        raise ValueError(f"{name}: {dtype} of shape {shape} does not fill the bytes {begin} to {end}")
    if data_start + end > file_size:
        raise ValueError(f"it is cut off: it has {file_size} bytes, and its header describes {data_start + end}")
    return Tensor(dtype, tuple(shape), data_start + begin, data_start + end)


def _is_list_of_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)
