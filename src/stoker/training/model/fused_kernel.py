"""Triton kernels for what is bound by memory: norms, rotation, SwiGLU, loss. Each reads and writes memory once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# of the backward of a norm: four per multiprocessor of an H100; each adds up its own share of the weight's gradient
PROGRAMS = 528


@triton.jit  # type: ignore[untyped-decorator]
def _add_norm(x, delta, weight, out, normed, rstd, width, eps, with_delta: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < width
    here = row * width + column
    value = tl.load(x + here, mask=inside, other=0.0).to(tl.float32)
    if with_delta:
        value += tl.load(delta + here, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(out.dtype.element_ty)
        tl.store(out + here, rounded, mask=inside)
        value = rounded.to(tl.float32)  # the norm of what is kept, so that backward sees the same numbers
    scale = 1.0 / tl.sqrt(tl.sum(value * value) / width + eps)
    tl.store(rstd + row, scale)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + here, value * scale * factor, mask=inside)


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(x + delta, its norm, 1 / rms)."""
    rows, width = x.shape
    out = torch.empty_like(x) if delta is not None else x
    normed = torch.empty_like(x)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    _add_norm[(rows,)](
        x, x if delta is None else delta, weight, out, normed, rstd, width, eps, delta is not None, block,
        num_warps=_warps(block),
    )  # fmt: skip
    return out, normed, rstd


@triton.jit  # type: ignore[untyped-decorator]
def _norm_backward(  # type: ignore[no-untyped-def]
    g, x, rstd, weight, onward, dx, normed, dweight, rows, width, with_onward: tl.constexpr, block: tl.constexpr
):
    program = tl.program_id(0)
    column = tl.arange(0, block)
    inside = column < width
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([block], dtype=tl.float32)
    for number in range(program, rows, tl.num_programs(0)):
        row = tl.full([], number, tl.int64)
        here = row * width + column
        dy = tl.load(g + here, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(rstd + row)
        unit = tl.load(x + here, mask=inside, other=0.0).to(tl.float32) * scale
        tl.store(normed + here, unit * factor, mask=inside)
        total += dy * unit
        inner = dy * factor
        gradient = (inner - unit * (tl.sum(inner * unit) / width)) * scale
        if with_onward:
            gradient += tl.load(onward + here, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + here, gradient, mask=inside)
    tl.store(dweight + program * width + column, total, mask=inside)


def norm_backward(
    g: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, onward: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of x with what comes past the norm added, the norm's output again, gradient of its weight)."""
    rows, width = x.shape
    programs = min(PROGRAMS, rows)
    dx, normed = torch.empty_like(x), torch.empty_like(x)
    dweight = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    more = g if onward is None else onward
    _norm_backward[(programs,)](
        g, x, rstd, weight, more, dx, normed, dweight, rows, width, onward is not None, block, num_warps=_warps(block)
    )
    return dx, normed, dweight.sum(0)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(  # type: ignore[no-untyped-def]
    qkv, cos, sin, heads, row_width, length, sign, per_row: tl.constexpr, half: tl.constexpr, head_block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    place = row if per_row else row % length
    pair = tl.arange(0, half)
    c = tl.load(cos + place * half + pair)[None, :]
    s = tl.load(sin + place * half + pair)[None, :] * sign
    head = tl.program_id(1) * head_block + tl.arange(0, head_block)
    inside = (head < heads)[:, None]
    first = qkv + row * row_width + head[:, None] * (2 * half) + pair[None, :]
    a = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(first + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(first, a * c - b * s, mask=inside)
    tl.store(first + half, b * c + a * s, mask=inside)


def rotate_in_place(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, head_dim: int, sign: float) -> None:
    """The first `heads` heads of each row; sign -1 turns back. cos, sin: [T, half], or one row per row of qkv."""
    rows, row_width = qkv.shape
    half = head_dim // 2
    per_row = cos.dim() == 3
    block = max(min(triton.next_power_of_2(heads), 4096 // half), 1)
    _rotate[(rows, triton.cdiv(heads, block))](
        qkv, cos, sin, heads, row_width, cos.shape[-2], sign, per_row, half, block, num_warps=4
    )


@triton.jit  # type: ignore[untyped-decorator]
def _swiglu(gate_up, out, width, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside).to(tl.float32)
    tl.store(out + row * width + column, gate * tl.sigmoid(gate) * up, mask=inside)


def swiglu(gate_up: Tensor) -> Tensor:
    rows, double = gate_up.shape
    out = torch.empty(rows, double // 2, dtype=gate_up.dtype, device=gate_up.device)
    _swiglu[(rows, triton.cdiv(double // 2, 1024))](gate_up, out, double // 2, 1024, num_warps=4)
    return out


def _warps(block: int) -> int:
    return min(max(block // 256, 1), 16)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_rotate(  # type: ignore[no-untyped-def]
    qkv, cos, sin, weight, out, rstd, start, heads, in_width, out_width, all_heads, length, eps, per_row: tl.constexpr,
    half: tl.constexpr, head_block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = row if per_row else row % length
    pair = tl.arange(0, half)
    c, s = tl.load(cos + place * half + pair)[None, :], tl.load(sin + place * half + pair)[None, :]
    wa, wb = tl.load(weight + pair).to(tl.float32)[None, :], tl.load(weight + half + pair).to(tl.float32)[None, :]
    head = tl.program_id(1) * head_block + tl.arange(0, head_block)
    inside = (head < heads)[:, None]
    column = (start + head[:, None]) * (2 * half) + pair[None, :]
    a = tl.load(qkv + row * in_width + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(qkv + row * in_width + column + half, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * half) + eps)
    tl.store(rstd + row * all_heads + start + head, scale, mask=head < heads)
    # Rounded before it is turned, as the plain block and the generator do: else answers are sampled from another model.
    a = (a * scale[:, None] * wa).to(qkv.dtype.element_ty).to(tl.float32)
    b = (b * scale[:, None] * wb).to(qkv.dtype.element_ty).to(tl.float32)
    tl.store(out + row * out_width + column, a * c - b * s, mask=inside)
    tl.store(out + row * out_width + column + half, b * c + a * s, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_rotate_backward(  # type: ignore[no-untyped-def]
    g, qkv, cos, sin, weight, rstd, dqkv, dweight, start, heads, in_width, out_width, all_heads, length, rows,
    per_row: tl.constexpr, half: tl.constexpr, head_block: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    pair = tl.arange(0, half)
    wa, wb = tl.load(weight + pair).to(tl.float32)[None, :], tl.load(weight + half + pair).to(tl.float32)[None, :]
    total_a = tl.zeros([half], dtype=tl.float32)
    total_b = tl.zeros([half], dtype=tl.float32)
    for number in range(program, rows, tl.num_programs(0)):
        row = tl.full([], number, tl.int64)
        place = row if per_row else row % length
        c, s = tl.load(cos + place * half + pair)[None, :], tl.load(sin + place * half + pair)[None, :]
        for begin in range(0, heads, head_block):
            head = begin + tl.arange(0, head_block)
            inside = (head < heads)[:, None]
            column = (start + head[:, None]) * (2 * half) + pair[None, :]
            ga = tl.load(g + row * out_width + column, mask=inside, other=0.0).to(tl.float32)
            gb = tl.load(g + row * out_width + column + half, mask=inside, other=0.0).to(tl.float32)
            ga, gb = ga * c + gb * s, gb * c - ga * s
            scale = tl.load(rstd + row * all_heads + start + head, mask=head < heads, other=0.0)[:, None]
            ua = tl.load(qkv + row * in_width + column, mask=inside, other=0.0).to(tl.float32) * scale
            ub = tl.load(qkv + row * in_width + column + half, mask=inside, other=0.0).to(tl.float32) * scale
            total_a += tl.sum(ga * ua, 0)
            total_b += tl.sum(gb * ub, 0)
            ga, gb = ga * wa, gb * wb
            mean = ((tl.sum(ga * ua, 1) + tl.sum(gb * ub, 1)) / (2 * half))[:, None]
            tl.store(dqkv + row * in_width + column, (ga - ua * mean) * scale, mask=inside)
            tl.store(dqkv + row * in_width + column + half, (gb - ub * mean) * scale, mask=inside)
    tl.store(dweight + program * 2 * half + pair, total_a)
    tl.store(dweight + program * 2 * half + half + pair, total_b)


def _heads_at_once(heads: int, half: int) -> int:
    return max(min(int(triton.next_power_of_2(heads)), 2048 // half), 1)


def norm_rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, q_weight: Tensor, k_weight: Tensor, heads: int, kv_heads: int, eps: float
) -> tuple[Tensor, Tensor]:
    """(queries and keys, normalised and turned, [rows, (heads + kv_heads) · head_dim]; 1 / rms of each head)."""
    rows, in_width = qkv.shape
    head_dim = q_weight.shape[0]
    both, half = heads + kv_heads, head_dim // 2
    out = torch.empty(rows, both * head_dim, dtype=qkv.dtype, device=qkv.device)
    rstd = torch.empty(rows, both, dtype=torch.float32, device=qkv.device)
    for weight, start, count in ((q_weight, 0, heads), (k_weight, heads, kv_heads)):
        block = _heads_at_once(count, half)
        _norm_rotate[(rows, triton.cdiv(count, block))](
            qkv, cos, sin, weight, out, rstd, start, count, in_width, both * head_dim, both, cos.shape[-2], eps,
            cos.dim() == 3, half, block, num_warps=4,
        )  # fmt: skip
    return out, rstd


def norm_rotate_backward(
    g: Tensor, qkv: Tensor, cos: Tensor, sin: Tensor, q_weight: Tensor, k_weight: Tensor, rstd: Tensor, dqkv: Tensor,
    heads: int, kv_heads: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Writes the queries' and keys' part of dqkv; gives the gradients of both weights."""
    rows, in_width = qkv.shape
    head_dim = q_weight.shape[0]
    both, half = heads + kv_heads, head_dim // 2
    programs = min(PROGRAMS * 2, rows)
    found = []
    for weight, start, count in ((q_weight, 0, heads), (k_weight, heads, kv_heads)):
        dweight = torch.empty(programs, head_dim, dtype=torch.float32, device=qkv.device)
        _norm_rotate_backward[(programs,)](
            g, qkv, cos, sin, weight, rstd, dqkv, dweight, start, count, in_width, both * head_dim, both, cos.shape[-2],
            rows, cos.dim() == 3, half, _heads_at_once(count, half), num_warps=4,
        )  # fmt: skip
        found.append(dweight.sum(0))
    return found[0], found[1]


LOSS_BLOCK = 8192


@triton.jit  # type: ignore[untyped-decorator]
def _loss_row(logits, targets, scale, losses, stride, vocabulary, ignored: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    here = logits + row * stride
    target = tl.load(targets + row)
    columns = tl.arange(0, block)
    if target == ignored:
        for begin in range(0, vocabulary, block):
            tl.store(here + begin + columns, 0.0, mask=begin + columns < vocabulary)
        tl.store(losses + row, 0.0)
        return
    highest = -float("inf")
    total = 0.0
    for begin in range(0, vocabulary, block):
        x = tl.load(here + begin + columns, mask=begin + columns < vocabulary, other=-float("inf")).to(tl.float32)
        top = tl.maximum(highest, tl.max(x))
        total = total * tl.exp(highest - top) + tl.sum(tl.exp(x - top))
        highest = top
    wanted = tl.load(here + target).to(tl.float32)
    tl.store(losses + row, highest + tl.log(total) - wanted)
    factor = tl.load(scale)
    tl.debug_barrier()  # every thread has read `wanted` before one overwrites it
    for begin in range(0, vocabulary, block):
        inside = begin + columns < vocabulary
        x = tl.load(here + begin + columns, mask=inside, other=-float("inf")).to(tl.float32)
        gradient = tl.exp(x - highest) / total
        gradient = tl.where(begin + columns == target, gradient - 1.0, gradient) * factor
        tl.store(here + begin + columns, gradient, mask=inside)


def gradient_in_place(logits: Tensor, targets: Tensor, scale: Tensor, losses: Tensor) -> None:
    rows, vocabulary = logits.shape
    block = min(LOSS_BLOCK, triton.next_power_of_2(vocabulary))
    _loss_row[(rows,)](
        logits, targets, scale, losses, logits.stride(0), vocabulary, ignored=-100, block=block, num_warps=16
    )


SWIGLU_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _swiglu_backward(g, gate_up, gradient, activations, width, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    one = row * width + column
    two = row * 2 * width + column
    dy = tl.load(g + one, mask=inside).to(tl.float32)
    gate = tl.load(gate_up + two, mask=inside).to(tl.float32)
    up = tl.load(gate_up + two + width, mask=inside).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    tl.store(gradient + two, dy * up * (sigmoid + silu * (1 - sigmoid)), mask=inside)
    tl.store(gradient + two + width, dy * silu, mask=inside)
    tl.store(activations + one, silu * up, mask=inside)


def swiglu_backward(g: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = g.shape
    gradient = torch.empty_like(gate_up)
    activations = torch.empty_like(g)
    _swiglu_backward[(rows, triton.cdiv(width, SWIGLU_BLOCK))](
        g, gate_up, gradient, activations, width, block=SWIGLU_BLOCK, num_warps=4
    )
    return gradient, activations
