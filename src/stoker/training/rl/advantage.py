"""How much better an answer is than the others to its prompt. Pure."""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-4


def advantages(rewards: Tensor, scaled: bool) -> Tensor:
    """[prompts, group] to the same shape. A group whose rewards are all alike teaches nothing: exactly 0, whatever
    rounding makes of its mean.
    """
    above = rewards - rewards.mean(1, keepdim=True)
    if scaled:
        above = above / (above.square().mean(1, keepdim=True).sqrt() + EPSILON)
    alike = (rewards == rewards[:, :1]).all(1, keepdim=True)
    return torch.where(alike, torch.zeros_like(above), above)
