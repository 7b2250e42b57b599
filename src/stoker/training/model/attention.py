"""Causal attention by the best kernel there is: cuDNN's on Hopper is 1.3-2 times flash 2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

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


def mask_of(segments: Tensor) -> Tensor:
    """[B, 1, T, T]: a token sees what comes before it in its own segment."""
    T = segments.shape[1]
    causal = torch.ones(T, T, dtype=torch.bool, device=segments.device).tril()
    return (causal & (segments[:, :, None] == segments[:, None, :]))[:, None]


def attend(q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, mask: Tensor | None, dropout: float = 0.0) -> Tensor:
    """[B, T, H, D], causal, or by `mask`. Grouped heads stay grouped: no copies of keys and values."""
    grouped = q_BTHD.shape[2] != k_BTHD.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q_BTHD, k_BTHD, v_BTHD))
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped, dropout_p=dropout
    ).transpose(1, 2)
