"""Muon: momentum whose singular values are all pushed to 1, for the matrices inside the blocks.

https://kellerjordan.github.io/posts/muon/ has the method and the five-step polynomial's coefficients. Of matrices in shards
(FSDP2) each is put together on one rank, which computes its update and sends everybody his rows of it: every rank computes
1 / ranks of the products, and sends and receives its own share of the weights twice. Gathering all of them on all ranks would
send ranks / 2 as much, and compute everything everywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stoker.contract.frozen import frozen
from stoker.training.optim.config import MUON_BYTES, OptimConfig

_A, _B, _C = 3.4445, -4.7750, 2.0315
_STEPS = 5
MOMENTUM = 0.95


@functools.cache
def has_bf16(device: torch.device) -> bool:
    """In hardware: since Ampere (compute capability 8), and in AMD's."""
    return device.type == "cuda" and bool(torch.version.hip or torch.cuda.get_device_capability(device)[0] >= 8)


def local(tensor: Tensor) -> Tensor:
    """A rank's own piece."""
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def cut_over(tensor: Any) -> tuple[Any, int, int]:
    """(process group, this rank in it, ranks) among which its rows are cut; other groups of a mesh hold copies."""
    mesh, (dim,) = tensor.device_mesh, [dim for dim, one in enumerate(tensor.placements) if one.is_shard()]
    return mesh.get_group(dim), mesh.get_local_rank(dim), mesh.size(dim)


def orthogonal(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., rows, columns] → its nearest matrix with singular values near 1 (0.7 to 1.2)."""
    x = x.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_STEPS):
        a = x @ x.mT
        x = _A * x + (_B * a + _C * a @ a) @ x
    return x.mT if tall else x


@frozen
class Place:
    """A matrix: rows of a parameter that has `of` of them."""

    name: str
    begin: int
    end: int
    of: int


class Spread:
    """The ranks among which parameters are cut by rows, as torch.chunk cuts them."""

    def __init__(self, parameter: Any) -> None:
        assert any(one.is_shard(0) for one in parameter.placements), "a parameter is not cut into rows"
        self._group, self._rank, self.world = cut_over(parameter)

    def _rows(self, place: Place, rank: int) -> tuple[int, int]:
        """Of the matrix, that a rank has."""
        each = -(-place.of // self.world)
        low, high = (min(max(at * each, place.begin), place.end) - place.begin for at in (rank, rank + 1))
        return low, high

    def own(self, place: Place, piece: Tensor) -> Tensor:
        """This rank's rows of the matrix. `piece`: of the parameter."""
        first = min(self._rank * -(-place.of // self.world), place.of)
        low, high = (place.begin + at - first for at in self._rows(place, self._rank))
        return piece[low:high] if high > low else piece[:0]

    def orthogonal(self, pieces: Sequence[Tensor], places: Sequence[Place], dtype: torch.dtype) -> list[Tensor]:
        """This rank's rows of matrices of one shape, before and after. Matrix i is put together on rank i modulo ranks."""
        ranks, columns = range(self.world), pieces[0].shape[1]
        counts = [[high - low for low, high in (self._rows(place, rank) for rank in ranks)] for place in places]
        of = [range(owner, len(places), self.world) for owner in ranks]  # which matrices
        mine = of[self._rank]
        sent = [sum(counts[at][self._rank] for at in of[rank]) * columns for rank in ranks]
        came = [sum(counts[at][rank] for at in mine) * columns for rank in ranks]
        outgoing = [pieces[at].to(dtype).flatten() for rank in ranks for at in of[rank]]
        found = self._exchanged(torch.cat(outgoing), sent, came)
        rows = [
            torch.split(piece.view(-1, columns), [counts[at][rank] for at in mine]) for rank, piece in enumerate(found)
        ]  # of each rank, of each matrix
        back = torch.cat(found)[:0]
        if mine:
            stacked = torch.stack([torch.cat([rows[rank][k] for rank in ranks]) for k in range(len(mine))])
            done = [torch.split(one, counts[at]) for at, one in zip(mine, orthogonal(stacked, dtype), strict=True)]
            back = torch.cat([one[rank].flatten() for rank in ranks for one in done])
        updates: dict[int, Tensor] = {}
        for rank, piece in enumerate(self._exchanged(back, came, sent)):
            own = torch.split(piece.view(-1, columns), [counts[at][self._rank] for at in of[rank]])
            updates |= dict(zip(of[rank], own, strict=True))
        return [updates[at] for at in range(len(places))]

    def _exchanged(self, data: Tensor, sent: Sequence[int], came: Sequence[int]) -> tuple[Tensor, ...]:
        """What each rank sent here. `data`: what goes to each, one behind the other."""
        found = data.new_empty(sum(came))
        dist.all_to_all_single(found, data, list(came), list(sent), group=self._group)
        return torch.split(found, list(came))


class Muon:
    """The two fused matrices (qkv, gate_up) are taken apart: each part is a map of its own. Matrices of one shape are
    orthogonalised together in one batch of products.
    """

    def __init__(self, named: Mapping[str, Tensor], parts: dict[str, tuple[int, ...]], c: OptimConfig) -> None:
        self._c, self.named = c, named
        self._pieces = {name: local(p.detach()) for name, p in named.items()}
        self._momentum = {name: torch.zeros_like(piece) for name, piece in self._pieces.items()}
        sharded = next((p for p in named.values() if hasattr(p, "device_mesh")), None)
        self._spread = Spread(sharded) if sharded is not None else None
        self._parts: dict[torch.Size, list[Place]] = {}
        for name, p in named.items():
            begin = 0
            for rows in parts.get(name, (p.shape[0],)):
                place = Place(name, begin, begin + rows, p.shape[0])
                self._parts.setdefault(torch.Size((rows, *p.shape[1:])), []).append(place)
                begin += rows

    def state(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        for name, parameter in self.named.items():
            yield f"{name}.momentum", self._momentum[name], parameter

    def set_count(self, steps: int) -> None:
        """Muon does not count its steps."""

    @torch.no_grad()
    def step(self, share: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        good = 1.0 - found_inf
        rate = self._c.muon_learning_rate * share
        names = list(self.named)
        gradients = []
        for name in names:
            gradient = self.named[name].grad
            assert gradient is not None, name
            gradients.append(torch.where(found_inf > 0, 0.0, local(gradient) / grad_scale))
        momentum = [self._momentum[name] for name in names]
        # With found_inf nothing may move: the momentum's own decay is undone by its weight.
        torch._foreach_mul_(momentum, 1.0 - good * (1.0 - MOMENTUM))
        torch._foreach_add_(momentum, torch._foreach_mul(gradients, good))
        ahead = dict(zip(names, torch._foreach_add(gradients, momentum, alpha=MOMENTUM), strict=True))
        for size, places in self._parts.items():
            factor = max(1.0, size[0] / size[1]) ** 0.5
            for place, one in self._updates(size, places, ahead):
                weight = self._own(place, self._pieces)
                weight.mul_(1.0 - good * rate * self._c.weight_decay)
                weight.sub_(one.to(weight.dtype) * (good * rate * factor))

    def _own(self, place: Place, pieces: Mapping[str, Tensor]) -> Tensor:
        """Its rows that are here."""
        piece = pieces[place.name]
        return piece[place.begin : place.end] if self._spread is None else self._spread.own(place, piece)

    def _updates(
        self, size: torch.Size, places: Sequence[Place], ahead: Mapping[str, Tensor]
    ) -> Iterator[tuple[Place, Tensor]]:
        """Of matrices of one shape. Experts are matrices of their own: a rank has whole ones."""
        pieces = [self._own(place, ahead) for place in places]
        dtype = torch.bfloat16 if has_bf16(pieces[0].device) else torch.float32
        if self._spread is None:
            yield from zip(places, orthogonal(torch.stack(pieces), dtype), strict=True)
        elif len(size) > 2:
            for place, piece in zip(places, pieces, strict=True):
                yield place, orthogonal(piece, dtype)
        else:
            at_once = self._spread.world * max(MUON_BYTES // (4 * size.numel()), 1)
            for begin in range(0, len(places), at_once):
                some = slice(begin, begin + at_once)
                yield from zip(places[some], self._spread.orthogonal(pieces[some], places[some], dtype), strict=True)
