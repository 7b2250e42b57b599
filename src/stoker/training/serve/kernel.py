"""A token of every row over a paged cache, as Triton kernels: keys and values are read where they lie, by the rows' blocks.

Few rows would leave most of a GPU idle: each row's tokens are then split among programs, whose sums a second kernel joins.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# bytes of keys, and of values, that a program takes at once: three in flight fit into 99 KB, which every GPU since
# Ampere has
TILE = 16384
PROGRAMS = 512  # that keep a large GPU busy
MOST_SPLITS = 32


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    queries, kv, out, peaks, sums, told, told_stride, first_block, scale, kv_heads, plane, head_stride, slot_stride,
    group: tl.constexpr, group_block: tl.constexpr, head_dim: tl.constexpr, tile: tl.constexpr, size: tl.constexpr,
    splits: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    member = tl.arange(0, group_block)
    dim = tl.arange(0, head_dim)
    inside = member < group
    which = (row * kv_heads + head) * group + member
    q = tl.load(queries + which[:, None] * head_dim + dim[None, :], mask=inside[:, None], other=0.0)
    about = told + row * told_stride
    end = tl.load(about).to(tl.int32) + 1
    each = tl.cdiv(tl.cdiv(end, tile), splits) * tile
    keys = kv + head * head_stride
    peak = tl.full([group_block], float("-inf"), tl.float32)
    total = tl.zeros([group_block], tl.float32)
    mixed = tl.zeros([group_block, head_dim], tl.float32)
    for first in range(split * each, tl.minimum(end, (split + 1) * each), tile):
        place = first + tl.arange(0, tile)
        seen = place < end
        block = tl.load(about + first_block + place // size, mask=seen, other=0)
        rows = keys + (block * size + place % size)[:, None] * slot_stride + dim[None, :]
        k = tl.load(rows, mask=seen[:, None], other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        score = tl.where(seen[None, :], score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1))  # finite: a tile begins with a token
        chance = tl.exp(score - higher[:, None])
        fade = tl.exp(peak - higher)
        v = tl.load(rows + plane, mask=seen[:, None], other=0.0)
        total = total * fade + tl.sum(chance, 1)
        mixed = mixed * fade[:, None] + tl.dot(chance.to(v.dtype), v, input_precision="ieee")
        peak = higher
    if splits == 1:
        tl.store(out + which[:, None] * head_dim + dim[None, :], mixed / total[:, None], mask=inside[:, None])
    else:
        part = which * splits + split
        tl.store(out + part[:, None] * head_dim + dim[None, :], mixed, mask=inside[:, None])
        tl.store(peaks + part, peak, mask=inside)
        tl.store(sums + part, total, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _join(mixed, peaks, sums, out, head_dim: tl.constexpr, splits: tl.constexpr):  # type: ignore[no-untyped-def]
    which = tl.program_id(0).to(tl.int64)
    part = which * splits + tl.arange(0, splits)
    dim = tl.arange(0, head_dim)
    peak = tl.load(peaks + part)  # -inf of those that had no token; the first has one
    share = tl.exp(peak - tl.max(peak))
    total = tl.sum(tl.load(sums + part) * share)
    parts = tl.load(mixed + part[:, None] * head_dim + dim[None, :])
    tl.store(out + which * head_dim + dim, tl.sum(parts * share[:, None], 0) / total)


def splits_for(rows: int, kv_heads: int, length: int, tile: int) -> int:
    """A power of two; no more than there are tiles."""
    wanted = min(max(PROGRAMS // (rows * kv_heads), 1), MOST_SPLITS, max(length // tile, 1))
    return 1 << (wanted.bit_length() - 1)


def attend(q: Tensor, kv: Tensor, told: Tensor, first_block: int, size: int, scale: float | None = None) -> Tensor:
    """One query per row and head, over all of the row so far. q: [rows, heads, head_dim]; kv: [2, 1, kv_heads, slots, head_dim];
    told: [rows, …] has the place of each row's token, and from column `first_block` on its blocks of `size` slots.
    """
    rows, heads, head_dim = q.shape
    kv_heads = kv.shape[2]
    tile = max(16, TILE // (head_dim * q.element_size()))
    splits = splits_for(rows, kv_heads, (told.shape[1] - first_block) * size, tile)
    group = heads // kv_heads
    out = torch.empty(rows, heads * head_dim, dtype=q.dtype, device=q.device)
    shape = (rows, heads, splits)
    mixed = out if splits == 1 else torch.empty(*shape, head_dim, dtype=torch.float32, device=q.device)
    peaks, sums = torch.empty(2, *shape if splits > 1 else (1,), dtype=torch.float32, device=q.device)
    _attend[(rows, kv_heads, splits)](
        q, kv, mixed, peaks, sums, told, told.stride(0), first_block, head_dim**-0.5 if scale is None else scale,
        kv_heads, kv.stride(0), kv.stride(2), kv.stride(3), group, max(16, triton.next_power_of_2(group)), head_dim, tile,
        size, splits, num_warps=4, num_stages=3,
    )  # fmt: skip
    if splits > 1:
        _join[(rows * heads,)](mixed, peaks, sums, out, head_dim, splits, num_warps=1)
    return out
