"""The learning rate as a share of its peak. Pure."""

from __future__ import annotations

import math

from stoker.training.optim.config import OptimConfig


def warmup(c: OptimConfig, steps: int) -> int:
    return c.warmup_steps or round(c.warmup_ratio * steps)


def share(c: OptimConfig, step: int, steps: int) -> float:
    """Of step 0, 1, …, steps - 1. The first step of a warm-up is not 0: it would be a step for nothing."""
    rising = min(warmup(c, steps), steps)
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
