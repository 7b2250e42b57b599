"""Inputs of recomputed blocks, in host memory from the forward to the backward pass (compute.activations host).

A copy leaves on a side stream while its block computes, and comes back while the block behind it goes backward. So the GPU
holds two inputs at a time, and that of the last block, which is needed first. Without a GPU the same copies are made in
memory, and save nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stoker.training.parallel.config import host_slab

_cuda: Any = torch.cuda  # whose classes carry no types in some of the torch versions we run with


class HostInputs:
    """Of one model. The memory is taken once, in the first step, and used again in every other."""

    def __init__(self, blocks: int, say: Callable[[str], None]) -> None:
        """`blocks`: that are recomputed."""
        self._blocks, self._say = blocks, say
        self._size = 0  # bytes of each that is free
        self._free: list[Tensor] = []
        self._streams: dict[torch.device, Any] = {}
        self._leaving: tuple[Tensor, Any] | None = None  # what is being copied, and the event behind that
        self._before: Input | None = None

    def keep(self, x: Tensor, place: int) -> Input:
        """`place`: which of the recomputed blocks it goes into."""
        self._settle()
        stays = place == self._blocks - 1
        kept = Input(self, x, self._before if place else None, None if stays else self._room(x))
        if kept.there is not None:
            self._leaving = x.detach(), self._copied(kept.there, x.detach(), x.device)
        self._before = None if stays else kept
        return kept

    def _settle(self) -> None:
        """What is launched from here on runs after the copy: the memory of what left can be used again."""
        if self._leaving is not None and self._leaving[1] is not None:
            _cuda.current_stream(self._leaving[0].device).wait_event(self._leaving[1])
        self._leaving = None

    def bring(self, there: Tensor, device: torch.device) -> tuple[Tensor, Any]:
        """(a tensor on the device, the event behind which it holds what lies `there`)."""
        here = torch.empty(there.shape, dtype=there.dtype, device=device)
        return here, self._copied(here, there, device)

    def _copied(self, to: Tensor, of: Tensor, device: torch.device) -> Any:
        """One stream for both ways: what is read comes after what was written, and a place is free when it was read."""
        if device.type != "cuda":
            copy(to, of)
            return None
        if device not in self._streams:
            self._streams[device] = _cuda.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(_cuda.current_stream(device))
        with _cuda.stream(stream):
            copy(to, of)
            return stream.record_event()

    def _room(self, x: Tensor) -> Tensor:
        if x.nbytes > self._size:
            self._size, self._free = x.nbytes, []
        if not self._free:
            self._grow(x.is_cuda)
        return self._free.pop()

    def _grow(self, pinned: bool) -> None:
        slab, count = host_slab(self._size, self._blocks)
        try:
            whole = torch.empty(slab, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        except RuntimeError as problem:
            if not pinned:
                raise
            why = str(problem).splitlines()[0]
            self._say(f"compute.activations host: memory can't be pinned ({why}); copies hold up the GPU")
            whole = torch.empty(slab, dtype=torch.uint8, device="cpu")
        self._free += [whole[n * self._size : (n + 1) * self._size] for n in range(count)]

    def give_back(self, room: Tensor) -> None:
        if room.numel() == self._size:
            self._free.append(room)


class Input:
    """A block's input: as it came in for the forward pass, brought back to compute the block again."""

    def __init__(self, pool: HostInputs, x: Tensor, before: Input | None, room: Tensor | None) -> None:
        """`before`: of the block before; `room`: for its copy in host memory, None: x stays."""
        self._pool, self._before, self._room = pool, before, room
        self.there = None if room is None else room[: x.nbytes].view(x.dtype).view(x.shape)
        self._given: Tensor | None = x
        self._device, self._learns = x.device, x.requires_grad
        self._here: Tensor | None = x.detach() if room is None else None
        self._event: Any = None

    def read(self) -> Tensor:
        """First for the forward pass, then to compute it again: the one before is on its way from then on."""
        if self._given is not None:
            x, self._given = self._given, None
            return x
        self._come()
        if self._before is not None:
            self._before._come()
        here = self._here
        assert here is not None
        self._wait()
        if self.there is not None:
            self._here = None
        return here.detach().requires_grad_(self._learns)

    def _come(self) -> None:
        if self._here is None and self.there is not None:
            self._here, self._event = self._pool.bring(self.there, self._device)

    def _wait(self) -> None:
        if self._event is not None:
            _cuda.current_stream(self._device).wait_event(self._event)
        self._event = None

    def __del__(self) -> None:
        self._wait()  # on its way and never read: its memory must not be used again before it has arrived
        if self._room is not None:
            self._pool.give_back(self._room)


def copy(to: Tensor, of: Tensor) -> None:
    to.copy_(of, non_blocking=True)
