"""Writes a safetensors file one tensor after the other: the host needs room for the largest, not for all of them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import BinaryIO

import torch
from torch import Tensor

from stoker.training.forensics.statistics import local

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def bytes_of(tensors: Mapping[str, Tensor]) -> int:
    return sum(local(one).numel() * one.element_size() for one in tensors.values())


def write(path: str, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    """Of a sharded tensor this rank's part; complex ones and other dtypes the format has no name for as fp32."""
    header: dict[str, object] = {"__metadata__": dict(about)} if about else {}
    end = 0
    for name, tensor in tensors.items():
        mine = local(tensor)
        size = 4 if mine.dtype not in _NAMES else mine.element_size()
        begin, end = end, end + mine.numel() * size
        header[name] = {"dtype": _NAMES.get(mine.dtype, "F32"), "shape": list(mine.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            _append(file, local(tensor))
        file.flush()
        os.fsync(file.fileno())


def _append(file: BinaryIO, mine: Tensor) -> None:
    if mine.dtype not in _NAMES:
        mine = mine.to(torch.float32)
    flat = mine.to("cpu").contiguous().reshape(-1)
    if flat.numel():
        file.write(flat.view(torch.uint8).numpy().data)
