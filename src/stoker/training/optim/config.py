"""Optimizer, schedule and batch."""

from __future__ import annotations

import math

from stoker.contract import limits
from stoker.contract.frozen import frozen
from stoker.contract.limits import choice


def micro(text: str) -> int:
    """A number of samples; auto is 0."""
    if text == "auto":
        return 0
    value = int(text)
    if value < 1:
        raise ValueError(f"{text} is not auto or a number from 1 up")
    return value


@frozen
class OptimConfig:
    kind: str = choice("adamw", "adamw8bit", "muon")(
        "adamw, adamw8bit (its two moments in 8 bits), or muon (matrices by Muon, the rest by AdamW)"
    )
    learning_rate: float = limits.POSITIVE("peak learning rate of AdamW", 3e-4)
    muon_learning_rate: float = limits.POSITIVE("peak learning rate of Muon's matrices", 0.02)
    min_ratio: float = limits.FRACTION("the schedule ends at this share of the peak", 0.1)
    schedule: str = choice("cosine", "linear", "constant", "wsd")(
        "wsd: constant, then linear over the last `cooldown` of the run"
    )
    warmup_steps: int = limits.COUNT("steps of linear warm-up (0: `warmup_ratio` counts)", 0)
    warmup_ratio: float = limits.FRACTION_BELOW_ONE("share of the run that is warm-up", 0.01)
    cooldown: float = limits.FRACTION("share of the run that wsd cools down", 0.2)
    weight_decay: float = limits.NOT_NEGATIVE("decoupled weight decay of matrices; norms have none", 0.1)
    beta1: float = limits.FRACTION_BELOW_ONE("AdamW's first moment", 0.9)
    beta2: float = limits.FRACTION_BELOW_ONE("AdamW's second moment", 0.95)
    eps: float = limits.POSITIVE("AdamW's epsilon", 1e-8)
    max_grad_norm: float = limits.NOT_NEGATIVE("gradients are scaled down to this norm (0: never)", 1.0)


@frozen
class BatchConfig:
    tokens: int = limits.LARGE(
        "tokens per optimizer step of all ranks together (0: micro × accumulation × ranks × context)",
        0,
    )
    micro: int = limits.COUNT(
        "samples a rank computes at once: a number, or auto for the largest that fits", 8, parse=micro, metavar="N|auto"
    )
    accumulation: int = limits.FROM_ONE("micro-batches per step and rank, where `tokens` is 0", 1)


BLOCK = 256  # numbers with one scale in 8-bit AdamW, at the most
CHUNK = 256 << 20  # bytes of what visits the GPU at a time, of tensors that live in host memory (parallel.offload)
MUON_BYTES = 1 << 28  # of fp32 matrices in shards that a rank puts together at once


def blocks_of(numbers: int) -> tuple[int, int]:
    """(blocks of a row, numbers of each) in 8-bit AdamW; the last one may be padded."""
    count = -(-numbers // BLOCK)
    return count, -(-numbers // count)


def warmup_length(c: OptimConfig, steps: int) -> int:
    return c.warmup_steps or round(c.warmup_ratio * steps)


def rate_share(c: OptimConfig, step: int, steps: int) -> float:
    """Of step 0, 1, …, steps - 1. The first step of a warm-up is not 0: it would be a step for nothing."""
    rising = min(warmup_length(c, steps), steps)
    if step < rising:
        return (step + 1) / (rising + 1)
    left = max(steps - rising, 1)
    done = min((step - rising) / left, 1.0)
    if c.schedule == "constant":
        return 1.0
    if c.schedule == "wsd":
        done = max(0.0, (done - (1 - c.cooldown)) / c.cooldown) if c.cooldown else 0.0
    fall = (1 + math.cos(math.pi * done)) / 2 if c.schedule == "cosine" else 1 - done
    return c.min_ratio + (1 - c.min_ratio) * fall
