"""What lies between the products of a block, in torch. kernel.py, and serve/kernel.py, have the same four for GPUs, for fewer options."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.training.model.attention import capped_attention
from stoker.training.model.linear import rms_norm, swiglu

__all__ = ["add_norm", "attend", "swiglu", "turn"]


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """(x + delta, its norm, or itself where there is none). weight: [width], or [2, width] with a LayerNorm's bias."""
    if delta is not None:
        x = x + delta
    if weight is None:
        return x, x
    if weight.dim() == 2:
        return x, F.layer_norm(x.float(), x.shape[-1:], weight[0], weight[1], eps).to(x.dtype)
    return x, (F.rms_norm(x.float(), x.shape[-1:], None, eps) * weight).to(x.dtype)


def turn(
    qkv: Tensor, cos: Tensor, sin: Tensor, qk_norm: Tensor | None, heads: int, eps: float, kv: Tensor,
    begin: int | Tensor, tokens: int, whole: bool = False,
) -> Tensor:  # fmt: skip
    """Gives the queries, normalised and turned; keys, too, and values go to `kv` [2, rows, kv_heads, slots, head_dim] from
    slot `begin` on. qkv: [rows · tokens, …]; cos and sin: [rows · tokens or tokens, what is turned of a head], sin with
    the sign of what is added to the first half. `whole`: the norm is over all heads of queries, and of keys.
    """
    kv_heads, head_dim = kv.shape[2], kv.shape[4]
    parts = qkv.view(-1, heads + 2 * kv_heads, head_dim)
    qk, v = parts[:, : heads + kv_heads], parts[:, heads + kv_heads :]
    wide = qk.float()
    if qk_norm is not None:  # the decoder's function, rounded where the decoder rounds
        if whole:
            both = (wide[:, :heads], qk_norm[:heads]), (wide[:, heads:], qk_norm[heads:])
            normed = [rms_norm(part.flatten(1), norm.flatten(), eps).view_as(part) for part, norm in both]
            wide = torch.cat(normed, 1).to(qkv.dtype).float()
        else:
            wide = rms_norm(wide, qk_norm, eps).to(qkv.dtype).float()
    width = cos.shape[-1]
    part = wide if width == head_dim else wide[..., :width]
    turned = part * cos[:, None] + part.roll(width // 2, -1) * sin[:, None]  # addcmul rounds once, the decoder twice
    if width < head_dim:
        turned = torch.cat([turned, wide[..., width:]], -1)
    turned = turned.to(qkv.dtype)
    for which, part in ((0, turned[:, heads:]), (1, v)):
        new = part if tokens == 1 else part.view(-1, tokens, kv_heads, head_dim).transpose(1, 2)
        if isinstance(begin, int):
            (kv[which, :, :, begin] if tokens == 1 else kv[which, :, :, begin : begin + tokens]).copy_(new)
        else:
            kv[which].index_copy_(2, begin, new[:, :, None] if tokens == 1 else new)
    return turned[:, :heads]


def attend(q: Tensor, kv: Tensor, mask: Tensor | None, scale: float | None = None, cap: float = 0.0) -> Tensor:
    """One query per row and head over the slots of `kv`. Heads that share keys are queries of one head."""
    rows, heads, head_dim = q.shape
    kv_heads = kv.shape[2]
    grouped = q.reshape(rows, kv_heads, heads // kv_heads, head_dim)
    if cap:
        return capped_attention(grouped, kv[0], kv[1], mask, 0.0, scale, cap).reshape(rows, heads * head_dim)
    y = F.scaled_dot_product_attention(grouped, kv[0], kv[1], attn_mask=mask, scale=scale)
    return y.reshape(rows, heads * head_dim)
