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
    x, codes, scales, second, offsets, levels, second_levels, out, m, n, out_stride, k: tl.constexpr,
    second_block: tl.constexpr, tokens: tl.constexpr, rows: tl.constexpr, groups: tl.constexpr,
):  # fmt: skip
    """`rows` of the matrix, all of k, for all tokens: what a code means is looked up once, and that is what takes the time.
    Elements of even and of odd place are two sums: nothing is interleaved.
    """
    row, token = tl.program_id(0) * rows + tl.arange(0, rows), tl.arange(0, tokens)
    per_row: tl.constexpr = k // 64
    sums = tl.zeros((tokens, rows, groups * 32), dtype=tl.float32)
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
        there = token[:, None] * k + 2 * byte[None, :]
        asked = (token < m)[:, None] & within[None, :]
        even = tl.load(x + there, mask=asked, other=0.0).to(tl.float32)
        odd = tl.load(x + there + 1, mask=asked, other=0.0).to(tl.float32)
        sums += upper[None, :, :] * even[:, None, :] + lower[None, :, :] * odd[:, None, :]
    target = out + token[:, None] * out_stride + row[None, :]
    tl.store(target, tl.sum(sums, 2).to(out.dtype.element_ty), mask=(token < m)[:, None] & (row < n)[None, :])


def product(
    x: Tensor, codes: Tensor, scales: Tensor, second: Tensor, offsets: Tensor, levels: Tensor, second_levels: Tensor,
    out: Tensor, how: tuple[int, int, int] | None = None,
) -> None:  # fmt: skip
    """out [m, n] = x [m, k] Wᵀ; x is contiguous, k a multiple of 64, out may be columns of a wider one. `how`: rows of the
    matrix and blocks of 64 that a program takes at once, and its warps.
    """
    (m, k), n = x.shape, out.shape[1]
    tokens = triton.next_power_of_2(m)
    rows, groups, warps = how or (max(16 // tokens, 4), 8, 4)
    _product[(triton.cdiv(n, rows),)](
        x, codes, scales, second, offsets, levels, second_levels, out, m, n, out.stride(0), k, 256,
        tokens, rows, groups, num_warps=warps,
    )  # fmt: skip
