"""Softmax, loss and gradient of one row of logits per program, in place: the row is read twice (the second time from
L2) and written once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192


@triton.jit  # type: ignore[untyped-decorator]
def _row(logits, targets, scale, losses, stride, vocabulary, ignored: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
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
    block = min(BLOCK, triton.next_power_of_2(vocabulary))
    _row[(rows,)](logits, targets, scale, losses, logits.stride(0), vocabulary, ignored=-100, block=block, num_warps=16)
