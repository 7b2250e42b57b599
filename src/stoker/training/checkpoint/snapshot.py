"""This rank's pieces of the tensors, and a copy of them as they are now, in host memory that is used again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from stoker.contract.frozen import frozen, replace
from stoker.contract.units import format_bytes

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_SPELLING = {
    "float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL", "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
DTYPES = {getattr(torch, ours): theirs for ours, theirs in _SPELLING.items() if hasattr(torch, ours)}


@frozen
class Block:
    """The part of a tensor that is here: where it begins in the whole, and its data."""

    offset: tuple[int, ...]
    data: torch.Tensor


@frozen
class Source:
    """One piece this rank writes; without `block` it only knows that the tensor exists."""

    name: str
    whole: tuple[int, ...]
    dtype: str
    block: Block | None
    start: int = 0  # where its bytes lie in the buffers, which is also where they lie in the file's data
    stop: int = 0


def dtype_of(name: str, tensor: torch.Tensor) -> str:
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{name}: {tensor.dtype} can't be stored in a safetensors file")
    return DTYPES[tensor.dtype]


def _is_sharded(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Without the class: importing it takes a quarter of what importing torch takes, and a process that only reads has none."""
    return hasattr(tensor, "device_mesh")


def local_block(name: str, tensor: torch.Tensor) -> tuple[Block, bool]:
    """What of it lies on this rank, and whether no other rank before this one has the same block."""
    if not _is_sharded(tensor):
        return Block((0,) * tensor.dim(), tensor.detach()), True
    from torch.distributed.tensor import Replicate, Shard

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
        if not _is_sharded(tensor):
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
    """Rows (first, last) of each (shape, bytes per element): one stream of bytes in equal parts, cut at rows."""
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


# torch's pinned allocator rounds up to a power of two: slabs of one waste nothing, where a single 9 GB buffer would
# take 16.
_SLAB = 128 << 20
# A thousand separate copies fill the driver's queue and hold up the host until the GPU has caught up; small ones are
# joined on the GPU.
_SMALL, _TOGETHER = 64 << 10, 512
_cuda: Any = torch.cuda  # whose classes carry no types in some of the torch versions we run with


def lay_out(found: Sequence[Source]) -> list[Source]:
    """Wide elements first: so each piece is aligned, and safetensors allows no gaps."""
    placed, at = list[Source](), 0
    for source in sorted(found, key=lambda one: -one.block.data.element_size() if one.block else 0):
        size = source.block.data.numel() * source.block.data.element_size() if source.block else 0
        placed.append(replace(source, start=at, stop=at + size))
        at += size
    return placed


class Buffers:
    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._slabs: list[torch.Tensor] = []

    @property
    def size(self) -> int:
        return sum(slab.numel() for slab in self._slabs)

    def reserve(self, size: int, pinned: bool) -> None:
        while self.size < size:
            slab = min(_SLAB, max(4096, 1 << math.ceil(math.log2(size - self.size))))
            try:
                self._slabs.append(torch.empty(slab, dtype=torch.uint8, pin_memory=pinned))
            except RuntimeError as problem:
                if not pinned:
                    raise
                why = str(problem).splitlines()[0]
                self._say(
                    f"{format_bytes(size)} of host memory for checkpoints can't be pinned ({why}); ordinary memory is taken, and"
                    " each save stalls training longer"
                )
                pinned = False
                continue
            self._slabs[-1].zero_()  # touched now, not while training waits for the first snapshot

    def put(self, start: int, data: torch.Tensor) -> None:
        """`data`: one row of bytes. Asynchronous where it comes from a GPU and the memory is pinned."""
        for slab, low, high in self._spans(start, start + data.numel()):
            slab[low:high].copy_(data[: high - low], non_blocking=True)
            data = data[high - low :]

    def read(self, size: int) -> Iterator[memoryview]:
        for slab, low, high in self._spans(0, size):
            yield slab[low:high].numpy().data

    def _spans(self, start: int, stop: int) -> Iterator[tuple[torch.Tensor, int, int]]:
        at = 0
        for slab in self._slabs:
            low, high = max(start - at, 0), min(stop - at, slab.numel())
            if low < high:
                yield slab, low, high
            at += slab.numel()

    def free(self) -> None:
        self._slabs = []


class Copying:
    """Copies under way on side streams. Keeps the sources alive until they are done."""

    def __init__(self) -> None:
        self._events: list[tuple[torch.device, Any]] = []
        self._alive: list[torch.Tensor] = []

    def let_current_streams_wait(self) -> None:
        """What is launched from here on runs after the copies; the host does not wait."""
        for device, event in self._events:
            _cuda.current_stream(device).wait_event(event)

    def finish(self) -> None:
        for _, event in self._events:
            event.synchronize()
        self._alive = []

    def start(self, placed: Sequence[Source], buffers: Buffers, streams: dict[torch.device, Any]) -> None:
        here = [(one, one.block.data) for one in placed if one.block is not None]
        devices = {data.device for _, data in here if data.is_cuda}
        for device in devices:
            if device not in streams:
                streams[device] = _cuda.Stream(device)
            streams[device].wait_stream(_cuda.current_stream(device))
        small: list[torch.Tensor] = []  # neighbours, on their way together
        for n, (one, data) in enumerate(here):
            if not data.is_cuda:
                buffers.put(one.start, data.reshape(-1).view(torch.uint8))
                continue
            with _cuda.stream(streams[data.device]):
                row = data.reshape(-1).view(torch.uint8)
                self._alive += [data, row]
                following = here[n + 1][1] if n + 1 < len(here) else None
                if row.numel() <= _SMALL:
                    small.append(row)
                    if (
                        following is not None
                        and following.device == data.device
                        and following.nbytes <= _SMALL
                        and len(small) < _TOGETHER
                    ):
                        continue
                    row = torch.cat(small) if len(small) > 1 else row
                    self._alive.append(row)
                    small = []
                buffers.put(one.stop - row.numel(), row)
        for device in devices:
            event = _cuda.Event(blocking=True)  # the writer sleeps instead of spinning on a core
            event.record(streams[device])
            self._events.append((device, event))
