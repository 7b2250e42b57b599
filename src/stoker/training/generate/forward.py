"""The decoder over a cache: all tokens of the prompts at once, then one token per row. The same sums as Decoder.hidden,
without its graph of gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.training.generate.weights import Weights
from stoker.training.model.config import ModelConfig

Attention = Callable[
    [Tensor, Tensor], Tensor
]  # queries [rows · tokens, heads, head_dim] and a layer's cache -> [rows · tokens, heads · head_dim]


def angles(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """A rotary table of half heads as `turn` takes it: whole heads, the first half's sine negative."""
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def blocks(
    w: Weights,
    c: ModelConfig,
    ops: Any,
    ids: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv: Tensor,
    begin: int | Tensor,
    tokens: int,
    attention: Attention,
) -> tuple[Tensor, Tensor | None]:
    """(residual stream, what is still to be added to it) of ids [rows · tokens]. `ops`: plain or kernel."""
    x = F.embedding(ids, w.embed)
    delta: Tensor | None = None
    for layer, cached in zip(w.layers, kv, strict=True):
        x, normed = ops.add_norm(x, delta, layer.attention_norm, w.eps)
        q = ops.turn(F.linear(normed, layer.qkv), cos, sin, layer.qk_norm, c.heads, w.eps, cached, begin, tokens)
        x, normed = ops.add_norm(x, F.linear(attention(q, cached), layer.out), layer.mlp_norm, w.eps)
        delta = F.linear(ops.swiglu(F.linear(normed, layer.gate_up)), layer.down)
    return x, delta


def logits_of(w: Weights, ops: Any, x: Tensor, delta: Tensor | None) -> Tensor:
    return F.linear(ops.add_norm(x, delta, w.norm, w.eps)[1], w.head)


def prefill(
    w: Weights, c: ModelConfig, ops: Any, ids: Tensor, lengths: Tensor, cos: Tensor, sin: Tensor, kv: Tensor
) -> Tensor:
    """Logits after each prompt. ids: [rows, tokens], filled up at the end."""
    rows, tokens = ids.shape

    def attention(q: Tensor, cached: Tensor) -> Tensor:
        k, v = cached[0, :, :, :tokens], cached[1, :, :, :tokens]
        queries = q.view(rows, tokens, -1, q.shape[-1]).transpose(1, 2)
        y = F.scaled_dot_product_attention(queries, k, v, is_causal=True, enable_gqa=queries.shape[1] != k.shape[1])
        return y.transpose(1, 2).reshape(rows * tokens, -1)

    x, delta = blocks(
        w, c, ops, ids.flatten(), cos[:tokens].repeat(rows, 1), sin[:tokens].repeat(rows, 1), kv, 0, tokens, attention
    )
    last = torch.arange(rows, device=ids.device) * tokens + lengths - 1
    return logits_of(w, ops, x[last], None if delta is None else delta[last])
