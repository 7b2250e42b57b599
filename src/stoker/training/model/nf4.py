"""Weights in NF4: 4 bits an element, in blocks of 64, with scales in 8 bits (double quantization). As bitsandbytes
computes and stores them, so that its folders and its adapters mean the same here.

A weight's elements lie in a row. Each block of 64 has a scale, its largest absolute value; an element's code is the
nearest of 16 levels (those of a normal distribution) times that scale. The scales, less their mean, are stored the same
way once more: blocks of 256, one of 256 levels, and a scale in fp32.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from stoker.contract.errors import EX_DATAERR, Refusal
from stoker.contract.frozen import frozen, replace
from stoker.training.model.nf4_size import BLOCK, SECOND_BLOCK, description
from stoker.training.model.nf4_size import NF4_PARTS as PARTS

LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# Above each of these, the next level is taken.
EDGES = (
    -0.8480964004993439, -0.6106329262256622, -0.4599952697753906, -0.33967943489551544, -0.23460740596055984,
    -0.13791173323988914, -0.045525018125772476, 0.03979014977812767, 0.1202552504837513, 0.2035212516784668,
    0.2920137718319893, 0.3893125355243683, 0.5016634166240692, 0.6427869200706482, 0.8614784181118011,
)  # fmt: skip
BITS = 4 + 8 / BLOCK + 32 / BLOCK / SECOND_BLOCK  # an element takes
_SMALLEST = 2e-38  # of numbers whose reciprocal a GPU computes; a block of zeros becomes zeros, not noise
STATE = PARTS[-1]


@frozen
class Quantized:
    codes: Tensor  # uint8: two elements each, the first in the upper half
    scales: Tensor  # uint8: of each block of 64
    second: Tensor  # fp32: of each 256 scales
    offset: Tensor  # fp32: the scales' mean
    size: tuple[int, ...]
    dtype: torch.dtype  # what it was, and is dequantized to


@functools.cache
def second_levels() -> tuple[float, ...]:
    """Seven decades, each with twice as many levels as the one below it."""
    found = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32)
        middles = (10.0 ** (decade - 6)) * ((edges[:-1] + edges[1:]) / 2.0)
        found += [*middles.tolist(), *(-middles).tolist()]
    return tuple(sorted(found))


def quantize(weight: Tensor) -> Quantized:
    codes, largest = coded(weight)
    offset = largest.mean()
    scales, second = scaled(largest - offset)
    return Quantized(codes, scales, second, offset, tuple(weight.shape), weight.dtype)


def coded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, the scale of each block)."""
    elements = weight.numel()
    if elements % BLOCK:
        raise ValueError(f"{elements} elements are not a multiple of {BLOCK}")
    blocks = weight.detach().reshape(elements // BLOCK, BLOCK).float()
    largest = blocks.abs().amax(dim=1)
    levels = torch.bucketize(_scaled(blocks, largest).flatten(), _on(EDGES, weight.device), out_int32=True)
    levels = levels.to(torch.uint8)
    return (levels[::2] << 4) | levels[1::2], largest


def _scaled(blocks: Tensor, largest: Tensor) -> Tensor:
    """Each block by its largest number: times 1 / that, as on GPUs, where that is a reciprocal of 23 bits. All zeros: zeros."""
    inverse = 1.0 / largest.clamp(min=_SMALLEST)
    if blocks.is_cuda:
        from stoker.training.model import nf4_kernel  # Triton: on GPUs only

        nf4_kernel.reciprocal(largest.clamp(min=_SMALLEST), inverse)
    return blocks * inverse[:, None]


def scaled(values: Tensor) -> tuple[Tensor, Tensor]:
    """Scales less their mean → (theirs in 8 bits, the scale of each 256)."""
    count = len(values)
    padded = torch.nn.functional.pad(values, (0, -count % SECOND_BLOCK))
    blocks = padded.view(len(padded) // SECOND_BLOCK, SECOND_BLOCK)
    largest = blocks.abs().amax(dim=1)
    levels = _on(second_levels(), values.device)
    middles = (levels[:-1] + levels[1:]) * 0.5
    if values.is_cuda:  # bitsandbytes' kernel: what lies in the middle gets the even code
        middles[1::2] = middles[1::2].nextafter(levels.new_tensor(-1.0))
    codes = torch.bucketize(_scaled(blocks, largest).flatten(), middles, out_int32=True)
    return codes[:count].to(torch.uint8), largest


def moved(q: Quantized, device: torch.device) -> Quantized:
    return replace(q, **{name: getattr(q, name).to(device) for name in ("codes", "scales", "second", "offset")})


def dequantize(q: Quantized) -> Tensor:
    return expand(_join([q]), torch.empty(q.size, dtype=q.dtype, device=q.codes.device))


@frozen
class Joined:
    """Parts of one layer, one below the other, as one kernel reads them."""

    codes: Tensor
    scales: Tensor
    second: Tensor
    offsets: Tensor  # fp32: of each 256 scales
    size: tuple[int, int]
    dtype: torch.dtype


def join(parts: Sequence[Quantized]) -> tuple[tuple[Joined, ...], tuple[Quantized, ...]]:
    """(the parts in as few pieces as their blocks allow, the parts again as views of those)."""
    whole = all(len(part.scales) % SECOND_BLOCK == 0 and part.dtype == parts[0].dtype for part in parts)
    groups = [_join(parts)] if whole else [_join([part]) for part in parts]
    views = list[Quantized]()
    for group, some in zip(groups, [parts] if whole else [[part] for part in parts], strict=True):
        cuts = {key: [len(getattr(part, key)) for part in some] for key in ("codes", "scales", "second")}
        pieces = zip(*(torch.split(getattr(group, key), sizes) for key, sizes in cuts.items()), strict=True)
        views += [replace(part, codes=c, scales=s, second=t) for part, (c, s, t) in zip(some, pieces, strict=True)]
    return tuple(groups), tuple(views)


def _join(parts: Sequence[Quantized]) -> Joined:
    one = parts[0]
    offsets = torch.cat([part.offset.expand(len(part.second)) for part in parts])
    rows = sum(part.size[0] for part in parts)
    codes, scales, second = (torch.cat([getattr(part, key) for part in parts]) for key in ("codes", "scales", "second"))
    return Joined(codes, scales, second, offsets, (rows, one.size[1]), one.dtype)


def expand(q: Joined, out: Tensor) -> Tensor:
    """Into `out`, of that size; its numbers are those of q's dtype."""
    if out.dtype != q.dtype or not out.is_contiguous():
        return out.copy_(expand(q, torch.empty(q.size, dtype=q.dtype, device=out.device)))
    levels, second = _on(LEVELS, out.device), _on(second_levels(), out.device)
    if out.is_cuda:
        from stoker.training.model import nf4_kernel  # Triton: on GPUs only

        nf4_kernel.dequantize(q.codes, q.scales, q.second, q.offsets, levels, second, out)
        return out
    of_256 = (q.second.repeat_interleave(SECOND_BLOCK), q.offsets.repeat_interleave(SECOND_BLOCK))
    factor, offset = (values[: len(q.scales)] for values in of_256)
    scales = second[q.scales.int()] * factor + offset
    pairs = torch.stack([levels[(q.codes >> 4).int()], levels[(q.codes & 15).int()]], dim=1)
    return out.copy_((pairs.view(-1, BLOCK) * scales[:, None]).view(q.size))


def multiply(x: Tensor, q: Joined, out: Tensor) -> None:
    """Into `out` [rows]: q x, for x [columns] on a GPU; columns are a multiple of BLOCK."""
    from stoker.training.model import nf4_kernel  # Triton: on GPUs only

    levels, second = _on(LEVELS, x.device), _on(second_levels(), x.device)
    nf4_kernel.product(x, q.codes, q.scales, q.second, q.offsets, levels, second, out)


@functools.cache
def _on(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def to_tensors(q: Quantized, name: str) -> dict[str, Tensor]:
    """As bitsandbytes stores the weight of that name."""
    about = {
        "quant_type": "nf4", "blocksize": BLOCK, "dtype": str(q.dtype)[6:], "shape": list(q.size),
        "nested_blocksize": SECOND_BLOCK, "nested_dtype": "float32", "nested_offset": float(q.offset),
    }  # fmt: skip
    state = torch.tensor(list(json.dumps(about).encode()), dtype=torch.uint8)
    levels, second = _on(LEVELS, torch.device("cpu")), _on(second_levels(), torch.device("cpu"))
    parts = dict(zip(PARTS, (q.scales, levels.clone(), q.second, second.clone(), state), strict=True))
    return {name: q.codes[:, None], **{f"{name}.{part}": tensor for part, tensor in parts.items()}}


def from_tensors(tensors: Mapping[str, Tensor], name: str, where: str) -> Quantized:
    """`tensors`: what belongs to that weight in a folder of bitsandbytes."""

    def refuse(why: str) -> Refusal:
        return Refusal(f"model {where}: {name} is not stored as NF4 weights are: {why}", EX_DATAERR)

    missing = [part for part in PARTS if f"{name}.{part}" not in tensors]
    if missing:
        raise refuse(f"{name}.{missing[0]} is missing (only NF4 with double quantization is read)")
    absmax, levels, nested, second_map, state = (tensors[f"{name}.{part}"] for part in PARTS)
    try:
        about = description(bytes(state.flatten().to(torch.uint8).tolist()))
    except ValueError as problem:
        raise refuse(str(problem)) from problem
    codes = tensors[name].flatten().view(torch.uint8)
    size, blocks = about["shape"], -(-torch.Size(about["shape"]).numel() // BLOCK)
    wanted = {"codes": blocks * BLOCK // 2, "absmax": blocks, "nested_absmax": -(-blocks // SECOND_BLOCK)}
    for what, tensor in (("codes", codes), ("absmax", absmax), ("nested_absmax", nested)):
        if tensor.numel() != wanted[what]:
            raise refuse(f"{what} has {tensor.numel()} numbers, and {wanted[what]} are needed for {size}")
    if absmax.dtype != torch.uint8 or nested.dtype != torch.float32:
        raise refuse(f"absmax is {absmax.dtype}, nested_absmax {nested.dtype}")
    for own, theirs in ((LEVELS, levels), (second_levels(), second_map)):
        if theirs.numel() != len(own) or not torch.allclose(
            theirs.flatten().float(), _on(own, theirs.device), rtol=0, atol=1e-6
        ):
            raise refuse("its levels are others than those of NF4")
    offset = torch.tensor(about["nested_offset"], dtype=torch.float32, device=codes.device)
    return Quantized(codes, absmax.flatten(), nested.flatten(), offset, tuple(size), getattr(torch, about["dtype"]))
