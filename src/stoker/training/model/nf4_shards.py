"""NF4 weights in shards: parameters that FSDP2 cuts over the ranks where a block of scales ends, every 64 × 256 elements, so
that a rank has whole blocks with their scales and the scales' scales.

A parameter's bytes are those of codes or scales, whatever its dtype: it has fp32, because FSDP2 makes none of whole numbers
in all versions of torch, and nobody computes with it. So it must never be cast (parallel/sharded.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stoker.contract.frozen import frozen
from stoker.training.checkpoint.snapshot import local_block
from stoker.training.model import nf4
from stoker.training.model.nf4_size import BLOCK, SECOND_BLOCK
from stoker.training.optim.muon import cut_over

UNIT = BLOCK * SECOND_BLOCK  # elements
_WORD = 4  # bytes of a parameter's number
_KINDS = ("codes", "scales", "second")


@frozen
class Part:
    """What the folder stores apart."""

    size: tuple[int, int]
    first: int  # unit of its group

    @property
    def elements(self) -> int:
        return math.prod(self.size)

    @property
    def units(self) -> int:
        return -(-self.elements // UNIT)


# (first element, element behind the last) of a part → those of the weight, as it was; or the folder's own codes.
Elements = Callable[[int, int], Tensor]
Given = Elements | nf4.Quantized


class Codes(nn.Module):
    """Of one layer. Parts lie in one piece where all of them end with a unit."""

    def __init__(self, sizes: Sequence[tuple[int, int]], dtype: torch.dtype) -> None:
        """`dtype`: of the weight that they become."""
        super().__init__()
        self._dtype = dtype
        together = all(math.prod(size) % UNIT == 0 for size in sizes)
        self.groups: list[list[Part]] = [[]] if together else [[] for _ in sizes]
        for at, size in enumerate(sizes):
            group = self.groups[0 if together else at]
            group.append(Part(size, sum(part.units for part in group)))
        for at, group in enumerate(self.groups):
            units = sum(part.units for part in group)
            for kind, width in zip(_KINDS, (UNIT // 2, SECOND_BLOCK, _WORD), strict=True):
                parameter = nn.Parameter(torch.empty(units, width // _WORD), requires_grad=False)
                self.register_parameter(f"{kind}{at}", parameter)
        self._offsets: list[Tensor] = []  # of each group: the mean of a part's scales, for each unit

    def joined(self, get: Callable[[Tensor], Tensor] = lambda parameter: parameter) -> tuple[nf4.Joined, ...]:
        """While they are gathered; or with what gathers them."""
        return tuple(self._joined(at, get) for at in range(len(self.groups)))

    def _joined(self, at: int, get: Callable[[Tensor], Tensor]) -> nf4.Joined:
        group = self.groups[at]
        # Shards that are kept in host memory are gathered there; the offsets are on the device that computes.
        device = self._offsets[at].device
        codes, scales, second = (get(getattr(self, f"{kind}{at}")).to(device) for kind in _KINDS)
        elements, rows = sum(part.elements for part in group), sum(part.size[0] for part in group)
        four_bits, eight_bits = (tensor.view(-1).view(torch.uint8) for tensor in (codes, scales))
        size = rows, group[0].size[1]
        return nf4.Joined(
            four_bits[: elements // 2],
            eight_bits[: elements // BLOCK],
            second.view(-1),
            self._offsets[at],
            size,
            self._dtype,
        )

    @torch.no_grad()
    def fill(self, given: Sequence[Given]) -> None:
        """Of each part; all ranks call this."""
        parts, self._offsets = iter(given), []
        for at, group in enumerate(self.groups):
            here = [local_block(kind, getattr(self, f"{kind}{at}")) for kind in _KINDS]
            first, count = here[0][0].offset[0], len(here[0][0].data)
            pieces, codes = [block.data for block, _ in here], getattr(self, f"{_KINDS[0]}{at}")
            among = cut_over(codes)[0] if hasattr(codes, "device_mesh") else None
            # Where they are computed with, which is not where they lie (parallel.offload).
            device = torch.device(codes.device_mesh.device_type) if among is not None else codes.device
            offsets = []
            for part in group:
                low, high = (min(max(edge - part.first, 0), part.units) for edge in (first, first + count))
                rows = slice(part.first + low - first, part.first + high - first) if high > low else slice(0, 0)
                q = _quantized(next(parts), part, low, high, device, among)
                for piece, data in zip(pieces, (q.codes, q.scales, q.second.view(torch.uint8)), strict=True):
                    _put(data, piece[rows])
                offsets.append(q.offset.to(device).expand(part.units))
            self._offsets.append(torch.cat(offsets))


def _put(data: Tensor, into: Tensor) -> None:
    """Bytes; what a last unit has not is left as zeros."""
    if into.numel():
        flat = into.view(-1).view(torch.uint8)
        flat[: len(data)] = data
        flat[len(data) :] = 0


def _quantized(given: Given, part: Part, low: int, high: int, device: torch.device, among: Any) -> nf4.Quantized:
    """Units `low` to `high` of a part. `among`: the ranks that have the others; None: nobody."""
    begin, end = (min(edge * UNIT, part.elements) for edge in (low, high))
    if isinstance(given, nf4.Quantized):
        codes, scales = given.codes[begin // 2 : end // 2], given.scales[begin // BLOCK : end // BLOCK]
        return nf4.Quantized(codes, scales, given.second[low:high], given.offset, part.size, given.dtype)
    elements = given(begin, end).to(device)
    codes, largest = nf4.coded(elements)
    # The mean is that of all blocks, in their order: ranks have the same bits as one that holds all of them.
    every = torch.zeros(part.elements // BLOCK, device=device)
    every[begin // BLOCK : end // BLOCK] = largest
    if among is not None:
        dist.all_reduce(every, group=among)
    offset = every.mean()
    scales, second = nf4.scaled(largest - offset)
    return nf4.Quantized(codes, scales, second, offset, part.size, elements.dtype)
