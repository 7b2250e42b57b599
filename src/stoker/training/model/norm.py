"""Norms of the block. Sums are fp32; the result is rounded once, to the activations' dtype.

Trainer and generator call the same function: a norm of queries and keys that rounds otherwise in one of them would make
other tokens likely than those that were learned.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stoker.training.model.config import ModelConfig


def rms_norm(wide: Tensor, weight: Tensor, eps: float) -> Tensor:
    """fp32 in and out."""
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight


class RMSNorm(nn.Module):
    def __init__(self, dim: int, c: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps, self.offset = c.norm_eps, c.norm_offset

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.float()
        if self.offset:
            weight = self.offset + weight
        return rms_norm(x.float(), weight, self.eps).to(x.dtype)


class LayerNorm(nn.Module):
    def __init__(self, dim: int, c: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.eps, self.offset = c.norm_eps, c.norm_offset

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.float() + self.offset if self.offset else self.weight.float()
        return F.layer_norm(x.float(), x.shape[-1:], weight, self.bias.float(), self.eps).to(x.dtype)


def norm_of(dim: int, c: ModelConfig) -> RMSNorm | LayerNorm:
    return LayerNorm(dim, c) if c.norm_kind == "layer" else RMSNorm(dim, c)
