"""What is kept of the moment a value went bad: statistics, and the tensors themselves for the dump."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from stoker.training.forensics.report import TensorStats
from stoker.training.forensics.statistics import Extremes, bad_samples, describe, finite, local, outline

TENSOR_BYTES = 64 << 20  # of one kept tensor; more is cut, and said
_DESCRIBED = 256  # origins with statistics, and
_KEPT = 16  # with their tensors: a model that masks in every layer has an origin in each


@dataclass
class Origin:
    number: int
    op: str
    phase: str
    module: str
    parameter: str
    source: str
    micro_batch: int | None
    what: str
    mask: bool  # -inf put in on purpose, for a softmax to take out again
    output: TensorStats | None = None
    inputs: tuple[TensorStats, ...] = ()
    samples: list[int] = field(default_factory=list)  # positions in the micro-batch
    tensors: dict[str, Tensor] = field(default_factory=dict)
    cuts: dict[str, str] = field(default_factory=dict)  # name -> what was left out


def keep(
    origin: Origin,
    read: list[tuple[str, Tensor, Extremes]],
    bad: tuple[str, Tensor, Extremes],
    batch: tuple[int, int],
    already: int,
) -> None:
    if already >= _DESCRIBED:
        return
    name, tensor, _ = bad
    origin.output = describe(name, tensor)
    origin.inputs = tuple(
        outline(one, given, ends) if finite(ends) and _same(given, tensor) else describe(one, given)
        for one, given, ends in read
    )
    origin.samples = bad_samples(tensor, *batch) if batch[0] else []
    if already >= _KEPT:
        return
    for label, one in (
        (name, tensor),
        *((f"input.{one}", given) for one, given, _ in read if not _same(given, tensor)),
    ):
        origin.tensors[label], cut = shortened(one)
        if cut:
            origin.cuts[label] = cut


def _same(one: Tensor, other: Tensor) -> bool:
    """Written in place: what it was before is gone."""
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape


def shortened(tensor: Tensor, limit: int = TENSOR_BYTES) -> tuple[Tensor, str]:
    """A copy in the host's memory, and what was left out: of a large one only a stretch, with its first bad value in
    it.
    """
    mine = local(tensor)
    size = mine.numel() * mine.element_size()
    if size <= limit:
        return mine.to("cpu", copy=True).contiguous(), ""
    room = max(1, limit // mine.element_size())
    flat = mine.reshape(-1)
    start = 0
    for begin in range(0, flat.numel(), room):
        good = flat[begin : begin + room].isfinite()
        if not bool(good.all()):
            start = max(0, begin + int(torch.nonzero(~good)[0]) - room // 2)
            break
    start = min(start, flat.numel() - room)
    return flat[start : start + room].to(
        "cpu", copy=True
    ), f"elements {start} to {start + room - 1} of {flat.numel()}, shape {list(mine.shape)}"
