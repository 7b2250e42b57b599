"""What lies between the products of a block, in torch. kernel.py has the same four for GPUs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + delta, its norm)."""
    if delta is not None:
        x = x + delta
    return x, (F.rms_norm(x.float(), x.shape[-1:], None, eps) * weight).to(x.dtype)


def turn(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    qk_norm: Tensor | None,
    heads: int,
    eps: float,
    kv: Tensor,
    begin: int | Tensor,
    tokens: int,
) -> Tensor:
    """Queries and keys normalised and turned; keys and values go to `kv` [2, rows, kv_heads, slots, head_dim] from slot
    `begin` on. Gives the queries.

    qkv: [rows · tokens, …]; cos and sin: [rows · tokens or tokens, head_dim], sin with the sign of what is added to the
    first half.
    """
    kv_heads, head_dim = kv.shape[2], kv.shape[4]
    parts = qkv.view(-1, heads + 2 * kv_heads, head_dim)
    qk, v = parts[:, : heads + kv_heads], parts[:, heads + kv_heads :]
    wide = qk.float()
    if qk_norm is not None:
        wide = (
            (F.rms_norm(wide, (head_dim,), None, eps) * qk_norm).to(qkv.dtype).float()
        )  # rounded where the decoder rounds
    turned = torch.addcmul(wide * cos[:, None], wide.roll(head_dim // 2, -1), sin[:, None]).to(qkv.dtype)
    for which, part in ((0, turned[:, heads:]), (1, v)):
        new = part if tokens == 1 else part.view(-1, tokens, kv_heads, head_dim).transpose(1, 2)
        if isinstance(begin, int):
            (kv[which, :, :, begin] if tokens == 1 else kv[which, :, :, begin : begin + tokens]).copy_(new)
        else:
            kv[which].index_copy_(2, begin, new[:, :, None] if tokens == 1 else new)
    return turned[:, :heads]


def attend(q: Tensor, kv: Tensor, mask: Tensor | None) -> Tensor:
    """One query per row and head over the slots of `kv`. Heads that share keys are queries of one head: nothing is
    repeated.
    """
    rows, heads, head_dim = q.shape
    kv_heads = kv.shape[2]
    grouped = q.reshape(rows, kv_heads, heads // kv_heads, head_dim)
    return F.scaled_dot_product_attention(grouped, kv[0], kv[1], attn_mask=mask).reshape(rows, heads * head_dim)


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate.float()) * up.float()).to(gate_up.dtype)
