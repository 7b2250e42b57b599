"""Who writes which piece of a tensor: replicated ones are shared out by bytes, sharded ones are written where they lie."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from stoker.contract.shape import shape

_SPELLING = {
    "float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL", "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
DTYPES = {getattr(torch, ours): theirs for ours, theirs in _SPELLING.items() if hasattr(torch, ours)}


@shape
class Block:
    """The part of a tensor that is here: where it begins in the whole, and its data."""

    offset: tuple[int, ...]
    data: torch.Tensor


@shape
class Source:
    """One piece this rank writes; without `block` it only knows that the tensor exists."""

    name: str
    whole: tuple[int, ...]
    dtype: str
    block: Block | None


def dtype_of(name: str, tensor: torch.Tensor) -> str:
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{name}: {tensor.dtype} has no place in a safetensors file")
    return DTYPES[tensor.dtype]


def local_block(name: str, tensor: torch.Tensor) -> tuple[Block, bool]:
    """What of it lies on this rank, and whether no other rank before this one has the same block."""
    if not isinstance(tensor, DTensor):
        return Block((0,) * tensor.dim(), tensor.detach()), True
    offset, size, first = [0] * tensor.dim(), list(tensor.shape), True
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return Block((0,) * tensor.dim(), _here(tensor)), False
    for dim, (placement, at) in enumerate(zip(tensor.placements, coordinate, strict=True)):
        if type(placement) is Shard:  # a strided shard is another class: its block is not one block of the whole
            # As torch.chunk: the last ones are smaller, or empty.
            full = -(-size[placement.dim] // tensor.device_mesh.size(dim))
            start = min(at * full, size[placement.dim])
            size[placement.dim] = min(full, size[placement.dim] - start)
            offset[placement.dim] += start
        elif type(placement) is Replicate:
            first = first and at == 0
        else:
            raise ValueError(f"{name}: a tensor placed as {placement} can't be saved; Shard and Replicate can")
    local = _here(tensor)
    if tuple(local.shape) != tuple(size):
        raise ValueError(
            f"{name}: this rank holds {list(local.shape)} of {list(tensor.shape)} where {tensor.placements} gives"
            f" {size}"
        )
    return Block(tuple(offset), local), first


def _here(tensor: DTensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.to_local().detach()


def sources(tensors: Mapping[str, torch.Tensor], rank: int, world: int) -> list[Source]:
    """What this rank writes. Every rank must come with the same `tensors`."""
    if "__metadata__" in tensors:
        raise ValueError("tensor name '__metadata__' can't be used here")
    found, shared = list[Source](), list[tuple[str, torch.Tensor]]()
    for name in sorted(tensors):
        tensor = tensors[name]
        if not isinstance(tensor, DTensor):
            shared.append((name, tensor.detach()))
            continue
        block, first = local_block(name, tensor)
        found.append(
            Source(name, tuple(tensor.shape), dtype_of(name, tensor), block if first and block.data.numel() else None)
        )
    rows = share([(tensor.shape, tensor.element_size()) for _, tensor in shared], rank, world)
    for (name, tensor), (start, stop) in zip(shared, rows, strict=True):
        mine = Block((start, *(0,) * (tensor.dim() - 1)), tensor[start:stop]) if tensor.dim() else Block((), tensor)
        found.append(Source(name, tuple(tensor.shape), dtype_of(name, tensor), mine if stop > start else None))
    return found


def share(tensors: Sequence[tuple[Sequence[int], int]], rank: int, world: int) -> list[tuple[int, int]]:
    """Rows (first, last) of each tensor, given as (shape, bytes per element), that this rank writes: all are one stream
    of bytes, cut into equal parts, and a cut moves to the nearest row.
    """
    total = sum(math.prod(size) * width for size, width in tensors)
    begin, end = total * rank // world, total * (rank + 1) // world
    found, start = list[tuple[int, int]](), 0
    for size, width in tensors:
        count = math.prod(size) * width
        rows = size[0] if len(size) else 1
        if count == 0:
            found.append((0, 0))
            continue
        row = count // rows
        first, last = (min(max((cut - start + row // 2) // row, 0), rows) for cut in (begin, end))
        found.append((first, last))
        start += count
    return found
