"""NF4 on GPUs, in Triton: a kernel that reads codes once and writes a matrix once, a product that never writes the matrix,
and a reciprocal. The arithmetic is nf4.py's.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCKS = 32  # of 64 elements, a program


@triton.jit  # type: ignore[untyped-decorator]
def _dequantize(  # type: ignore[no-untyped-def]
    codes, scales, second, offsets, levels, second_levels, out, count, second_block: tl.constexpr, blocks: tl.constexpr
):
    first = tl.program_id(0).to(tl.int64) * blocks
    block = first + tl.arange(0, blocks)
    inside = block < count
    level = tl.load(second_levels + tl.load(scales + block, mask=inside, other=0).to(tl.int32))
    place = block // second_block
    scale = level * tl.load(second + place, mask=inside, other=0.0) + tl.load(offsets + place, mask=inside, other=0.0)
    here = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    pair = tl.load(codes + here, mask=inside[:, None], other=0).to(tl.int32)
    upper = tl.load(levels + (pair >> 4)) * scale[:, None]
    lower = tl.load(levels + (pair & 15)) * scale[:, None]
    both = tl.interleave(upper, lower)
    there = block[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(out + there, both.to(out.dtype.element_ty), mask=inside[:, None])


def dequantize(
    codes: Tensor, scales: Tensor, second: Tensor, offsets: Tensor, levels: Tensor, second_levels: Tensor, out: Tensor
) -> None:
    """Into `out`, which is contiguous. No fused multiply-add: bitsandbytes rounds the product before it adds the mean."""
    count = scales.numel()
    _dequantize[(triton.cdiv(count, BLOCKS),)](
        codes, scales, second, offsets, levels, second_levels, out, count, 256, BLOCKS, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _reciprocal(x, out, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * block + tl.arange(0, block)
    value = tl.load(x + place, mask=place < count, other=1.0)
    fast = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [value], dtype=tl.float32, is_pure=True, pack=1
    )
    tl.store(out + place, fast, mask=place < count)


def reciprocal(x: Tensor, out: Tensor) -> None:
    """1 / x to 23 bits, as bitsandbytes' kernels compute it."""
    _reciprocal[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), 1024, num_warps=4)


@triton.jit  # type: ignore[untyped-decorator]
def _product(  # type: ignore[no-untyped-def]
    x, codes, scales, second, offsets, levels, second_levels, out, n, k: tl.constexpr, second_block: tl.constexpr,
    rows: tl.constexpr, groups: tl.constexpr,
):  # fmt: skip
    """`rows` of the matrix, all of k. Elements of even and of odd place are two sums: nothing is interleaved."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    per_row: tl.constexpr = k // 64
    sums = tl.zeros((rows, groups * 32), dtype=tl.float32)
    for begin in range(0, per_row, groups):
        group = begin + tl.arange(0, groups)
        block = row[:, None].to(tl.int64) * per_row + group[None, :]
        inside = (row < n)[:, None] & (group < per_row)[None, :]
        level = tl.load(second_levels + tl.load(scales + block, mask=inside, other=0).to(tl.int32))
        place = block // second_block
        scale = level * tl.load(second + place, mask=inside, other=0.0)
        scale += tl.load(offsets + place, mask=inside, other=0.0)
        scale = tl.reshape(tl.broadcast_to(scale[:, :, None], (rows, groups, 32)), (rows, groups * 32))
        byte = begin * 32 + tl.arange(0, groups * 32)
        within = byte < k // 2
        here = row[:, None].to(tl.int64) * (k // 2) + byte[None, :]
        pair = tl.load(codes + here, mask=(row < n)[:, None] & within[None, :], other=0).to(tl.int32)
        upper = tl.load(levels + (pair >> 4)) * scale
        lower = tl.load(levels + (pair & 15)) * scale
        even = tl.load(x + 2 * byte, mask=within, other=0.0).to(tl.float32)
        odd = tl.load(x + 2 * byte + 1, mask=within, other=0.0).to(tl.float32)
        sums += upper * even[None, :] + lower * odd[None, :]
    tl.store(out + row, tl.sum(sums, 1).to(out.dtype.element_ty), mask=row < n)


def product(
    x: Tensor, codes: Tensor, scales: Tensor, second: Tensor, offsets: Tensor, levels: Tensor, second_levels: Tensor,
    out: Tensor, how: tuple[int, int, int] = (16, 8, 4),
) -> None:  # fmt: skip
    """out [n] = W x [k]; both contiguous, k a multiple of 64. `how`: rows of the matrix and blocks of 64 that a program takes at
    once, and its warps.
    """
    rows, groups, warps = how
    n, k = out.numel(), x.numel()
    _product[(triton.cdiv(n, rows),)](
        x, codes, scales, second, offsets, levels, second_levels, out, n, k, 256, rows, groups, num_warps=warps
    )
