"""The backward of silu(gate) · up in one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _backward(g, gate_up, gradient, activations, width, block: tl.constexpr):  # type: ignore[no-untyped-def]
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


def backward(g: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = g.shape
    gradient = torch.empty_like(gate_up)
    activations = torch.empty_like(g)
    _backward[(rows, triton.cdiv(width, BLOCK))](g, gate_up, gradient, activations, width, block=BLOCK, num_warps=4)
    return gradient, activations
