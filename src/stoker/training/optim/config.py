"""Optimizer, schedule and batch."""

from __future__ import annotations

import math

from stoker.contract import limits
from stoker.contract.shape import option, shape


def micro(text: str) -> int:
    """A number of samples; auto is 0."""
    if text == "auto":
        return 0
    value = int(text)
    if value < 1:
        raise ValueError(f"{text} is not auto or a number from 1 up")
    return value


@shape
class OptimConfig:
    kind: str = option(
        "adamw, adamw8bit (its two moments in 8 bits), or muon (matrices by Muon, the rest by AdamW)",
        default="adamw",
        choices=("adamw", "adamw8bit", "muon"),
    )
    learning_rate: float = option("peak learning rate of AdamW", default=3e-4, limit=limits.POSITIVE)
    muon_learning_rate: float = option("peak learning rate of Muon's matrices", default=0.02, limit=limits.POSITIVE)
    min_ratio: float = option("the schedule ends at this share of the peak", default=0.1, limit=limits.SHARE)
    schedule: str = option(
        "cosine, linear, constant, or wsd (constant, then linear over the last `cooldown` of the run)",
        default="cosine",
        choices=("cosine", "linear", "constant", "wsd"),
    )
    warmup_steps: int = option("steps of linear warm-up (0: `warmup_ratio` counts)", default=0, limit=limits.COUNT)
    warmup_ratio: float = option("share of the run that is warm-up", default=0.01, limit=limits.LESS_THAN_ALL)
    cooldown: float = option("share of the run that wsd cools down", default=0.2, limit=limits.SHARE)
    weight_decay: float = option(
        "decoupled weight decay of matrices; norms have none", default=0.1, limit=limits.NOT_NEGATIVE
    )
    beta1: float = option("AdamW's first moment", default=0.9, limit=limits.LESS_THAN_ALL)
    beta2: float = option("AdamW's second moment", default=0.95, limit=limits.LESS_THAN_ALL)
    eps: float = option("AdamW's epsilon", default=1e-8, limit=limits.POSITIVE)
    max_grad_norm: float = option(
        "gradients are scaled down to this norm (0: never)", default=1.0, limit=limits.NOT_NEGATIVE
    )


@shape
class BatchConfig:
    tokens: int = option(
        "tokens per optimizer step, all ranks together; any number of ranks may share them (0: micro × accumulation ×"
        " ranks × context)",
        default=0,
        limit=limits.LARGE,
    )
    micro: int = option(
        "samples a rank computes at once: a number, or auto for the largest that fits",
        default=8,
        parse=micro,
        metavar="N|auto",
        limit=limits.COUNT,
    )
    accumulation: int = option("micro-batches per step and rank, where `tokens` is 0", default=1, limit=limits.FROM_ONE)


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
