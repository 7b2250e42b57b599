"""Is a tensor finite, and what is in it, read on its device in one pass; and what is kept of where it went bad."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stoker.training.forensics.report import TensorStats

_CHUNK = 1 << 24  # elements that are widened to fp32 at once: 64 MB, whatever the tensor's size
TENSOR_BYTES = 64 << 20  # of one kept tensor; more is cut, and said
_DESCRIBED = 256  # origins with statistics, and
_KEPT = 16  # with their tensors: a model that masks in every layer has an origin in each

Extremes = tuple[float, float]
Named = tuple[str, Tensor]
Value = tuple[str, Tensor, Extremes]


def plain(tensor: Tensor) -> list[Tensor]:
    """The dense tensors it is made of: itself; the local shard of a DTensor; the parts of any other wrapper."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        inside = [getattr(tensor, name) for name in names]  # a DTensor names its mesh, too
        return [part for one in inside if isinstance(one, Tensor) for part in plain(one)]
    return [tensor] if tensor.layout == torch.strided and tensor.device.type != "meta" else []


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of it."""
    parts = plain(tensor.detach())
    return parts[0] if parts else tensor.detach()


def counted(tensor: Tensor) -> bool:
    """Can it hold a NaN at all?"""
    return (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() > 0


def extremes(tensors: Sequence[Tensor]) -> list[Extremes]:
    """Smallest and largest of each, in one host read. aminmax hands a NaN on, without isfinite's large mask."""
    ends = []
    for tensor in tensors:
        for part in plain(tensor)[:1]:
            values = torch.view_as_real(part) if part.is_complex() else part
            if values.dtype.itemsize == 1:  # float8 has no aminmax
                values = values.to(torch.float32)
            low, high = torch.aminmax(values)
            ends.append(torch.stack((low, high)).to(device=tensors[0].device, dtype=torch.float64))
    if len(ends) != len(tensors):
        raise ValueError("a tensor without elements that can be read")
    return [(float(low), float(high)) for low, high in torch.stack(ends).tolist()] if ends else []


def finite(ends: Extremes) -> bool:
    return math.isfinite(ends[0]) and math.isfinite(ends[1])


def word(ends: Extremes) -> str:
    """What is first to be said of a tensor that is not finite."""
    if math.isnan(ends[0]) or math.isnan(ends[1]):
        return "NaN"
    return "Inf" if ends[1] == math.inf else "-Inf"


def is_bad(tensor: Tensor) -> bool:
    parts = [part for part in plain(tensor.detach()) if counted(part)]
    return any(not finite(ends) for ends in extremes(parts))


def describe(name: str, tensor: Tensor) -> TensorStats:
    """Exact counts and the range of the finite part."""
    mine = local(tensor)
    nan = inf = 0
    low, high = math.inf, -math.inf
    if counted(mine):
        values = torch.view_as_real(mine.resolve_conj()) if mine.is_complex() else mine
        flat = values.reshape(-1)
        for start in range(0, flat.numel(), _CHUNK):
            chunk = flat[start : start + _CHUNK]
            wide = chunk if chunk.dtype == torch.float64 else chunk.to(torch.float32)
            good = wide.isfinite()
            least, most = wide.masked_fill(~good, math.inf).amin(), wide.masked_fill(~good, -math.inf).amax()
            counts = wide.isnan().sum(), wide.isinf().sum()
            found = torch.stack([one.double() for one in (*counts, least, most)]).tolist()
            nan, inf, low, high = nan + int(found[0]), inf + int(found[1]), min(low, found[2]), max(high, found[3])
    return _stats(name, mine, nan, inf, (low, high))


def _stats(name: str, mine: Tensor, nan: int, inf: int, ends: Extremes) -> TensorStats:
    shape, dtype, (low, high) = tuple(mine.shape), str(mine.dtype).removeprefix("torch."), ends
    if low > high:
        return TensorStats(name, shape, dtype, mine.numel(), nan, inf)
    return TensorStats(name, shape, dtype, mine.numel(), nan, inf, low, high, max(abs(low), abs(high)))


def bad_samples(output: Tensor, samples: int, length: int) -> list[int]:
    """Positions in the batch whose rows are not finite; none where the shape does not tell whose rows are whose."""
    mine = local(output)
    by_sample = (mine.dim() >= 2 and tuple(mine.shape[:2]) == (samples, length)) or (
        mine.dim() >= 3 and mine.shape[0] == samples
    )
    by_head = mine.dim() == 3 and mine.shape[0] % samples == 0 and mine.shape[1] == length
    by_token = mine.dim() >= 1 and mine.shape[0] == samples * length
    if not (by_sample or by_head or by_token):
        return []
    rows = mine.reshape(samples, -1)
    return [number for number in range(samples) if not bool(rows[number].isfinite().all())]


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


def keep(origin: Origin, read: list[Value], bad: Value, batch: tuple[int, int], already: int) -> None:
    if already >= _DESCRIBED:
        return
    name, tensor, _ = bad
    origin.output = describe(name, tensor)
    # Of a tensor that has been overwritten since: what was seen of it before, when it was finite.
    origin.inputs = tuple(
        _stats(one, local(given), 0, 0, ends) if finite(ends) and _same(given, tensor) else describe(one, given)
        for one, given, ends in read
    )
    origin.samples = bad_samples(tensor, *batch) if batch[0] else []
    if already >= _KEPT:
        return
    inputs = ((f"input.{one}", given) for one, given, _ in read if not _same(given, tensor))
    for label, kept in ((name, tensor), *inputs):
        origin.tensors[label], cut = shortened(kept)
        if cut:
            origin.cuts[label] = cut


def _same(one: Tensor, other: Tensor) -> bool:
    """Written in place: what it was before is gone."""
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape


def shortened(tensor: Tensor, limit: int = TENSOR_BYTES) -> tuple[Tensor, str]:
    """A copy in host memory, and what was left out: of a large one, all but a stretch around its first bad value."""
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
    cut = f"elements {start} to {start + room - 1} of {flat.numel()}, shape {list(mine.shape)}"
    return flat[start : start + room].to("cpu", copy=True), cut
