"""A copy of the tensors as they are now, in host memory that is allocated once and used again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from stoker.contract.quantities import gb
from stoker.contract.shape import shape
from stoker.training.checkpoint.pieces import Source

# torch's pinned allocator rounds up to a power of two: slabs of one waste nothing, where a single 9 GB buffer would
# take 16.
_SLAB = 128 << 20
# A thousand separate copies fill the driver's queue and hold up the host until the GPU has caught up; small ones are
# joined on the GPU.
_SMALL, _TOGETHER = 64 << 10, 512
_cuda: Any = torch.cuda  # whose classes carry no types in some of the torch versions we run with


@shape
class Placed:
    """A source and where its bytes lie in the buffers, which is also where they lie in the file's data."""

    source: Source
    start: int
    stop: int


def lay_out(found: Sequence[Source]) -> list[Placed]:
    """Wide elements first: so each piece is aligned, and safetensors allows no gaps."""
    placed, at = list[Placed](), 0
    for source in sorted(found, key=lambda one: -one.block.data.element_size() if one.block else 0):
        size = source.block.data.numel() * source.block.data.element_size() if source.block else 0
        placed.append(Placed(source, at, at + size))
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
                    f"{gb(size)} of host memory for checkpoints can't be pinned ({why}); ordinary memory is taken, and"
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

    def start(self, placed: Sequence[Placed], buffers: Buffers, streams: dict[torch.device, Any]) -> None:
        here = [one for one in placed if one.source.block is not None]
        devices = {one.source.block.data.device for one in here if one.source.block and one.source.block.data.is_cuda}
        for device in devices:
            if device not in streams:
                streams[device] = _cuda.Stream(device)
            streams[device].wait_stream(_cuda.current_stream(device))
        small: list[torch.Tensor] = []  # neighbours, on their way together
        for n, one in enumerate(here):
            assert one.source.block is not None
            data = one.source.block.data
            if not data.is_cuda:
                buffers.put(one.start, data.reshape(-1).view(torch.uint8))
                continue
            with _cuda.stream(streams[data.device]):
                row = data.reshape(-1).view(torch.uint8)
                self._alive += [data, row]
                following = here[n + 1].source.block if n + 1 < len(here) else None
                if row.numel() <= _SMALL:
                    small.append(row)
                    if (
                        following is not None
                        and following.data.device == data.device
                        and following.data.nbytes <= _SMALL
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
