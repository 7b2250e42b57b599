"""plain.py's operations as Triton kernels, and sampling: nine kernels a layer where torch would take forty."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.training.model import fused_kernel

CHUNK = 1024  # words of the vocabulary that one program adds up


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out, normed, _ = fused_kernel.add_norm(x, delta, weight, eps)
    return out, normed


swiglu = fused_kernel.swiglu


@triton.jit  # type: ignore[untyped-decorator]
def _turn(  # type: ignore[no-untyped-def]
    qkv, cos, sin, norm, queries, kv, begin, heads, kv_heads, tokens, plane, row_stride, head_stride, slot_stride, eps,
    with_norm: tl.constexpr, begin_is_told: tl.constexpr, each_is_told: tl.constexpr, half: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    pair = tl.arange(0, half)
    here = qkv + (token * (heads + 2 * kv_heads) + head) * (2 * half) + pair
    a = tl.load(here).to(tl.float32)
    b = tl.load(here + half).to(tl.float32)
    if head < heads + kv_heads:
        if with_norm:
            scale = 1.0 / tl.sqrt((tl.sum(a * a) + tl.sum(b * b)) / (2 * half) + eps)
            factor = norm + head * (2 * half) + pair
            # Rounded where the decoder rounds.
            a = (a * scale * tl.load(factor)).to(qkv.dtype.element_ty).to(tl.float32)
            b = (b * scale * tl.load(factor + half)).to(qkv.dtype.element_ty).to(tl.float32)
        c = tl.load(cos + token * (2 * half) + pair)
        s = tl.load(sin + token * (2 * half) + half + pair)
        turned = a * c - b * s
        b = b * c + a * s
        a = turned
    if head < heads:
        target = queries + (token * heads + head) * (2 * half) + pair
        tl.store(target, a)
        tl.store(target + half, b)
    else:
        if each_is_told:
            slot = tl.load(begin + token)
        else:
            slot = token % tokens + (tl.load(begin) if begin_is_told else begin)
        which = (head - heads) // kv_heads
        target = (
            kv
            + which * plane
            + (token // tokens) * row_stride
            + ((head - heads) % kv_heads) * head_stride
            + slot * slot_stride
            + pair
        )
        tl.store(target, a)
        tl.store(target + half, b)


def turn(
    qkv: Tensor, cos: Tensor, sin: Tensor, qk_norm: Tensor | None, heads: int, eps: float, kv: Tensor,
    begin: int | Tensor, tokens: int,
) -> Tensor:  # fmt: skip
    kv_heads, head_dim = kv.shape[2], kv.shape[4]
    told = not isinstance(begin, int)
    each = not isinstance(begin, int) and begin.numel() > 1
    queries = torch.empty(qkv.shape[0], heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    _turn[(qkv.shape[0], heads + 2 * kv_heads)](
        qkv, cos, sin, qkv if qk_norm is None else qk_norm, queries, kv, begin, heads, kv_heads, tokens,
        *kv.stride()[:4], eps, qk_norm is not None, told, each, head_dim // 2, num_warps=1,
    )  # fmt: skip
    return queries


@triton.jit  # type: ignore[untyped-decorator]
def _chunks(logits, peaks, sums, width, temperatures, chunk: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1)
    column = number * chunk + tl.arange(0, chunk)
    value = tl.load(logits + row * width + column, mask=column < width, other=float("-inf")).to(tl.float32)
    warmth = tl.load(temperatures + row)
    value = value / tl.where(warmth > 0, warmth, 1.0)
    peak = tl.max(value)
    tl.store(peaks + row * tl.num_programs(1) + number, peak)
    tl.store(sums + row * tl.num_programs(1) + number, tl.sum(tl.exp(value - peak)))


@triton.jit  # type: ignore[untyped-decorator]
def _pick(  # type: ignore[no-untyped-def]
    logits, peaks, sums, uniform, out, width, chunks, temperatures, chunk: tl.constexpr, chunk_block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, chunk_block)
    peak = tl.load(peaks + row * chunks + number, mask=number < chunks, other=float("-inf"))
    top = tl.max(peak)
    running = tl.cumsum(tl.load(sums + row * chunks + number, mask=number < chunks, other=0.0) * tl.exp(peak - top), 0)
    warmth = tl.load(temperatures + row)
    at = tl.load(uniform + row) * tl.max(running)
    which = tl.minimum(tl.sum((running <= at).to(tl.int32)), chunks - 1)
    which = tl.where(warmth > 0, which, tl.minimum(tl.argmax(peak, 0), chunks - 1))
    rest = at - tl.max(tl.where(running <= at, running, 0.0))
    column = which * chunk + tl.arange(0, chunk)
    value = tl.load(logits + row * width + column, mask=column < width, other=float("-inf")).to(tl.float32)
    value = value / tl.where(warmth > 0, warmth, 1.0)
    chance = tl.exp(value - top)
    found = tl.sum((tl.cumsum(chance, 0) <= rest).to(tl.int32))
    # The chunk's sum was rounded another way: `rest` may lie just behind its end.
    last = tl.max(tl.where(chance > 0, tl.arange(0, chunk), 0))
    found = tl.where(warmth > 0, tl.minimum(found, last), tl.argmax(value, 0))
    tl.store(out + row, tl.minimum(which * chunk + found, width - 1).to(tl.int64))


def sample_token(logits: Tensor, uniform: Tensor, temperature: float | Tensor) -> Tensor:
    """sample.sample_token where nothing is left out: the chunk that `uniform` falls in, then the word within it. Temperatures:
    one, or one for each row; 0 is greedy."""
    rows, width = logits.shape
    count = triton.cdiv(width, CHUNK)
    peaks = torch.empty(2, rows, count, dtype=torch.float32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not isinstance(temperature, Tensor):
        temperature = torch.full((rows,), temperature, dtype=torch.float32, device=logits.device)
    _chunks[(rows, count)](logits, peaks[0], peaks[1], width, temperature, CHUNK, num_warps=4)
    block = triton.next_power_of_2(count)
    _pick[(rows,)](logits, peaks[0], peaks[1], uniform, out, width, count, temperature, CHUNK, block, num_warps=4)
    return out
