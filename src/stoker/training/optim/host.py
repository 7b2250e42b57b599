"""Tensors that stay in host memory and visit the device for an update (parallel.offload).

The device computes the update, with the same kernel as without parallel.offload. Without a GPU the same copies are made in memory,
and save nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from stoker.training.optim.config import CHUNK

LEAST = 1 << 20  # bytes of a tensor that is worth locking: smaller ones share pages with others


def locked(tensors: Iterable[Tensor], say: Callable[[str], None]) -> None:
    """Into memory that the GPU can reach by itself. Registered where it lies: torch's own pinned allocator takes powers of two,
    twice of what 32 B weights need."""
    if not torch.cuda.is_available():
        return
    for tensor in tensors:
        if tensor.device.type != "cpu" or tensor.nbytes < LEAST or tensor.is_pinned():
            continue
        code = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))  # type: ignore[no-untyped-call]
        if code:
            say(f"parallel.offload: memory can't be locked (CUDA error {code}; ulimit -l?); copies hold up the GPU")
            return


def at_home(tensor: Tensor) -> Tensor:
    """As large as it, in host memory."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")


class Visit:
    """Of some tensors on a device; `back` are those that are written there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._home: list[tuple[Tensor, Tensor]] = []

    def bring(self, tensor: Tensor, *, back: bool = True) -> Tensor:
        here = tensor.to(self._device, non_blocking=True, copy=True)
        if back:
            self._home.append((tensor, here))
        return here

    def leave(self) -> None:
        for home, here in self._home:
            home.copy_(here, non_blocking=True)
        self._home.clear()
        if self._device.type == "cuda":  # whoever reads host memory next does not wait for the stream
            torch.cuda.current_stream(self._device).synchronize()


def chunks(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Places of tensors that visit together: up to CHUNK bytes, and at least one."""
    some: list[int] = []
    total = 0
    for place, size in enumerate(sizes):
        if some and total + size > CHUNK:
            yield some
            some, total = [], 0
        some.append(place)
        total += size
    if some:
        yield some
