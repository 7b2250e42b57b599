"""What blocks keep for the backward pass, in host memory until then (compute.activations host).

A recomputed block keeps its input, another one what autograd saves in it. Copies leave on a side stream while the block and
one or two behind it compute, and come back while those go backward: of more than inputs the GPU holds one block's at a time
besides that which computes. The last block, which is needed first, keeps all on the GPU. Without a GPU the same copies are made
in memory, and save nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from stoker.training.parallel.config import HOST_LEAST, OFFLOADED, RECOMPUTED, host_slab

_cuda: Any = torch.cuda  # whose classes carry no types in some of the torch versions we run with


class HostKept:
    """Of one model. The memory is taken once, in the first step, and used again in every other."""

    def __init__(self, kinds: Sequence[str], say: Callable[[str], None]) -> None:
        """`kinds`: of each block."""
        self._kinds, self._say = kinds, say
        self._inputs = _Room(kinds[:-1].count(RECOMPUTED), self._unpinned)
        self._saved: list[_Room] = []  # for the first storage that a block saves, the second one, ...
        self._streams: dict[torch.device, Any] = {}
        self._leaving: list[
            tuple[int, Tensor, Any]
        ] = []  # (block before which it has left, what, the event behind that)
        self._before: _Block | None = None

    def input(self, x: Tensor, place: int) -> Input:
        """Of block `place`, which is recomputed."""
        before = self._enter(place)
        kept = Input(self, x, before, None if self._is_last(place) else self._inputs)
        self.leave(kept, place + 1)
        self._before = None if self._is_last(place) else kept
        return kept

    @contextmanager
    def saved(self, place: int, device: torch.device, stays: set[int]) -> Iterator[None]:
        """Around the forward pass of block `place`. `stays`: storages that others hold anyway."""
        before = self._enter(place)
        kept = Saved(self, before, device, None if self._is_last(place) else place, stays)
        self._before = None if self._is_last(place) else kept
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
            yield
        kept.packed()
        if self._is_last(place):
            self._settle(place + 2)

    def room(self, at: int) -> _Room:
        """For storage `at` of those that a block saves."""
        while len(self._saved) <= at:
            self._saved.append(_Room(self._kinds.count(OFFLOADED), self._unpinned))
        return self._saved[at]

    def gone_before(self, place: int) -> int:
        """The block before which the copies have left that block `place` saves: the copies take longer than its forward pass,
        and those of the next such block follow."""
        return place + (2 if self._kinds[place + 1] == OFFLOADED else 3)

    def leave(self, kept: _Block, before: int) -> None:
        """Its newest piece, if there is room for it. On its way until block `before` begins."""
        piece = kept.pieces[-1]
        if piece.there is not None and piece.here is not None:
            self._leaving.append((before, piece.here, self.copied(piece.there, piece.here, piece.device)))
            piece.here = None

    def _is_last(self, place: int) -> bool:
        return place == len(self._kinds) - 1

    def _enter(self, place: int) -> _Block | None:
        """What the block before keeps."""
        self._settle(place or len(self._kinds) + 1)
        return self._before if place else None

    def _settle(self, place: int) -> None:
        """What is launched from here on runs after the copies: the memory of what left can be used again."""
        gone = [(what, event) for before, what, event in self._leaving if before <= place]
        if gone and gone[-1][1] is not None:  # one stream: those before it are done, too
            _cuda.current_stream(gone[-1][0].device).wait_event(gone[-1][1])
        self._leaving = [one for one in self._leaving if one[0] > place]

    def copied(self, to: Tensor, of: Tensor, device: torch.device) -> Any:
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

    def _unpinned(self, why: str) -> None:
        self._say(f"compute.activations host: memory can't be pinned ({why}); copies hold up the GPU")


class _Room:
    """Pieces of host memory of one size, as many as blocks need at a time."""

    def __init__(self, pieces: int, unpinned: Callable[[str], None]) -> None:
        self._pieces, self._unpinned = pieces, unpinned
        self._size = 0  # bytes of each that is free
        self._free: list[Tensor] = []

    def take(self, size: int, pinned: bool) -> Tensor:
        if size > self._size:
            self._size, self._free = size, []
        if not self._free:
            self._grow(pinned)
        return self._free.pop()

    def _grow(self, pinned: bool) -> None:
        slab, count = host_slab(self._size, self._pieces)
        try:
            whole = torch.empty(slab, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        except RuntimeError as problem:
            if not pinned:
                raise
            self._unpinned(str(problem).splitlines()[0])
            whole = torch.empty(slab, dtype=torch.uint8, device="cpu")
        self._free += [whole[n * self._size : (n + 1) * self._size] for n in range(count)]

    def give_back(self, piece: Tensor) -> None:
        if piece.numel() == self._size:
            self._free.append(piece)


class _Piece:
    """A tensor, on its device or in host memory."""

    def __init__(self, host: HostKept, of: Tensor, room: _Room | None) -> None:
        """`room`: for its copy in host memory, None: it stays."""
        self._host, self._room = host, room
        self._taken = None if room is None else room.take(of.nbytes, of.is_cuda)
        self.there = None if self._taken is None else self._taken[: of.nbytes].view(of.dtype).view(of.shape)
        self.here: Tensor | None = of
        self.device = of.device
        self._event: Any = None

    def come(self) -> None:
        if self.here is None and self.there is not None:
            self.here = torch.empty(self.there.shape, dtype=self.there.dtype, device=self.device)
            self._event = self._host.copied(self.here, self.there, self.device)

    def read(self, last: bool) -> Tensor:
        """`last`: nobody else will."""
        self.come()
        self._wait()
        here = self.here
        assert here is not None
        if last and self.there is not None:
            self.here = None
        return here

    def _wait(self) -> None:
        if self._event is not None:
            _cuda.current_stream(self.device).wait_event(self._event)
        self._event = None

    def __del__(self) -> None:
        self._wait()  # on its way and never read: its memory must not be used again before it has arrived
        if self._room is not None and self._taken is not None:
            self._room.give_back(self._taken)


class _Block:
    """What one block keeps from its forward to its backward pass."""

    def __init__(self, host: HostKept, before: _Block | None) -> None:
        """`before`: of the block before."""
        self._host, self._before = host, before
        self.pieces: list[_Piece] = []  # in the order in which the backward pass reads them, last first
        self._begun = False

    def begin(self) -> None:
        """Its backward pass: what the block before keeps is on its way from then on; where that is an input alone, what the one
        before that has saved, too."""
        if self._begun:
            return
        self._begun = True
        self.come()
        before = self._before
        if before is not None:
            before.come()
        if isinstance(before, Input) and isinstance(before._before, Saved):
            before._before.come()

    def come(self) -> None:
        for piece in reversed(self.pieces):
            piece.come()


class Input(_Block):
    """A block's input: as it came in for the forward pass, brought back to compute the block again."""

    def __init__(self, host: HostKept, x: Tensor, before: _Block | None, room: _Room | None) -> None:
        super().__init__(host, before)
        self.pieces.append(_Piece(host, x.detach(), room))
        self._given: Tensor | None = x
        self._learns = x.requires_grad

    def read(self) -> Tensor:
        """First for the forward pass, then to compute it again."""
        if self._given is not None:
            x, self._given = self._given, None
            return x
        self.begin()
        return self.pieces[0].read(last=True).detach().requires_grad_(self._learns)


class Saved(_Block):
    """What autograd saves in a block. Each storage is copied once, however many views of it are saved."""

    def __init__(
        self, host: HostKept, before: _Block | None, device: torch.device, place: int | None, stays: set[int]
    ) -> None:
        """`place`: of the block; None: all of it stays where it is."""
        super().__init__(host, before)
        self._device, self._place, self._stays = device, place, stays
        self._known: dict[int, _Storage] = {}  # during the forward pass, which keeps them alive

    def pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        key = storage._cdata
        moves = self._place is not None and tensor.device == self._device and storage.nbytes() >= HOST_LEAST
        if not moves or key in self._stays:
            return tensor
        piece = self._known.pop(key, None)
        if piece is None:
            piece = self._sent(storage)
        self._known[key] = piece  # behind the others: it is read before them
        piece.views += 1
        return _View(piece, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _sent(self, storage: Any) -> _Storage:
        assert self._place is not None
        flat = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
        piece = _Storage(self._host, flat, self._host.room(len(self.pieces)))
        self.pieces.append(piece)
        self._host.leave(self, self._host.gone_before(self._place))
        return piece

    def packed(self) -> None:
        """The forward pass is over."""
        self.pieces, self._known = list(self._known.values()), {}

    def unpack(self, kept: Any) -> Tensor:
        self.begin()
        found: Tensor = kept.read() if isinstance(kept, _View) else kept
        return found


class _Storage(_Piece):
    views = 0  # that were saved and not yet read


class _View:
    def __init__(
        self, piece: _Storage, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...], offset: int
    ) -> None:
        self._piece, self._dtype, self._how = piece, dtype, (offset, size, stride)

    def read(self) -> Tensor:
        self._piece.views -= 1
        storage = self._piece.read(last=self._piece.views <= 0).untyped_storage()
        return torch.empty(0, dtype=self._dtype, device=self._piece.device).set_(storage, *self._how)


def copy(to: Tensor, of: Tensor) -> None:
    to.copy_(of, non_blocking=True)
