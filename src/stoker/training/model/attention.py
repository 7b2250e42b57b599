"""Rotary embedding, masks, and causal attention by the best kernel there is: cuDNN's on Hopper is 1.3-2 times flash 2."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from stoker.training.model.config import ModelConfig

_KERNELS = {
    "cudnn": [SDPBackend.CUDNN_ATTENTION], "flash": [SDPBackend.FLASH_ATTENTION], "math": [SDPBackend.MATH],
    "deterministic": [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH],
    "auto": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
}  # fmt: skip


@contextmanager
def kernels(which: str) -> Iterator[None]:
    """In this order; around everything that traces or runs the model."""
    with sdpa_kernel(_KERNELS[which], set_priority=True):
        yield


def rotary_table(length: int, c: ModelConfig, theta: float = 0.0) -> tuple[Tensor, Tensor]:
    """cos and sin, [T, half of what is turned of a head], in fp32 throughout as transformers computes them: an exacter
    table would make other logits than theirs. `theta`: another base, unstretched.
    """
    turned = int(c.head_dim * c.rope_share)
    frequency = 1.0 / (
        (theta or c.rope_theta) ** (torch.arange(0, turned, 2, dtype=torch.float32, device="cpu") / turned)
    )
    if not theta:
        frequency = _stretched(frequency, length, c)
    angle = torch.outer(torch.arange(length, dtype=torch.float32, device="cpu"), frequency)
    if theta or c.rope_attention == 1.0:
        return angle.cos(), angle.sin()
    return angle.cos() * c.rope_attention, angle.sin() * c.rope_attention


def _stretched(frequency: Tensor, length: int, c: ModelConfig) -> Tensor:
    if c.rope_kind == "longrope":
        factors = c.rope_long if length > c.rope_original else c.rope_short
        return frequency / torch.tensor(factors, dtype=torch.float32, device="cpu")
    if c.rope_factor == 1.0:
        return frequency
    if c.rope_kind == "linear":
        return frequency / c.rope_factor
    if c.rope_kind == "yarn":
        kept = 1 - _ramp(len(frequency), c)
        return frequency / c.rope_factor * (1 - kept) + frequency * kept
    turns = c.rope_original * frequency / (2 * math.pi)
    kept = ((turns - c.rope_low) / (c.rope_high - c.rope_low)).clamp(0, 1)
    return (1 - kept) * frequency / c.rope_factor + kept * frequency


def _ramp(count: int, c: ModelConfig) -> Tensor:
    """Yarn: 0 for the frequencies that stay, 1 for those that are divided, linear in between."""
    turned = 2 * count

    def dimension(turns: float) -> float:
        """Where the frequency makes so many turns in `rope_original` tokens."""
        return turned * math.log(c.rope_original / (turns * 2 * math.pi)) / (2 * math.log(c.rope_theta))

    first, last = dimension(c.rope_high), dimension(c.rope_low)
    if c.rope_truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, turned - 1)
    if first == last:
        last += 0.001
    return ((torch.arange(count, dtype=torch.float32, device="cpu") - first) / (last - first)).clamp(0, 1)


def rotate(x_BTHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE as transformers lays it out: the first half of what is turned of a head turns with the second."""
    turned = 2 * cos.shape[-1]
    if turned < x_BTHD.shape[-1]:
        return torch.cat([rotate(x_BTHD[..., :turned], cos, sin), x_BTHD[..., turned:]], dim=-1)
    first, second = x_BTHD.float().chunk(2, dim=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_BTHD.dtype)


def mask_of(segments: Tensor | None, window: int, length: int, device: torch.device) -> Tensor | None:
    """[B or 1, 1, T, T]: a token sees what comes before it in its own segment, at most `window` tokens with itself (0:
    all). None: plain causal attention.
    """
    if segments is None and not 0 < window < length:
        return None
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    if 0 < window < length:
        causal = causal.triu(1 - window)
    if segments is None:
        return causal[None, None]
    return (causal & (segments[:, :, None] == segments[:, None, :]))[:, None]


def attend(
    q_BTHD: Tensor,
    k_BTHD: Tensor,
    v_BTHD: Tensor,
    mask: Tensor | None,
    dropout: float = 0.0,
    scale: float | None = None,
    cap: float = 0.0,
) -> Tensor:
    """[B, T, H, D], causal, or by `mask`. Grouped heads stay grouped: no copies of keys and values."""
    grouped = q_BTHD.shape[2] != k_BTHD.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q_BTHD, k_BTHD, v_BTHD))
    if cap:
        if mask is None:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        return capped_attention(q, k, v, mask, dropout, scale, cap).transpose(1, 2)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped, dropout_p=dropout, scale=scale
    ).transpose(1, 2)


def capped_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, scale: float | None, cap: float
) -> Tensor:
    """[B, H, T, D]: scores are bounded softly before the mask, which no fused kernel of torch does."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)).float() * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = cap * torch.tanh(scores / cap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return F.dropout(scores.softmax(-1), dropout).to(v.dtype) @ v
