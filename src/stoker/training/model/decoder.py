"""The decoder, plain: torch's own operations. Which options of the block a model uses is in its ModelConfig.

Weights are fp32 and are cast where they are used; activations have the dtype of `Decoder.dtype`. Queries, keys and
values are one matrix, gate and up another: one large product instead of three or two. Names of shapes: B batch, T
tokens, D width, H heads.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stoker.training.forensics.scopes import scope
from stoker.training.model.attention import Documents, Seen, attend, begins, rotary_table, rotate, seen_by
from stoker.training.model.config import ModelConfig, check_options
from stoker.training.model.fp8 import fp8_linear
from stoker.training.model.loss import capped, linear_cross_entropy
from stoker.training.model.swiglu import activation, swiglu_linear


class Linear(nn.Linear):
    """The weight is cast to the activations' dtype: fp32 master, bf16 product. `parts`: rows of the maps joined in it."""

    def __init__(self, inputs: int, *parts: int, bias: bool = False) -> None:
        super().__init__(inputs, sum(parts), bias=bias)
        self.parts = parts
        self.fp8 = False

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if self.fp8:
            product = fp8_linear(x, self.weight)
            return product if bias is None else product + bias
        return F.linear(x, self.weight.to(x.dtype), bias)


class RMSNorm(nn.Module):
    def __init__(self, dim: int, c: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps, self.offset = c.norm_eps, c.norm_offset

    def forward(self, x: Tensor) -> Tensor:
        wide, weight = x.float(), self.weight.float()
        if self.offset:
            weight = self.offset + weight
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * weight).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.dropout = c.heads, c.kv_heads, c.head_dim, c.dropout
        self.scale, self.cap, self.whole = c.attention_scale or None, c.attention_cap, c.qk_norm_whole
        queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
        self.qkv = Linear(c.dim, queries, keys, keys, bias=c.qkv_bias)
        self.out = Linear(queries, c.dim, bias=c.out_bias)
        self.q_norm = RMSNorm(queries if self.whole else c.head_dim, c) if c.qk_norm else None
        self.k_norm = RMSNorm(keys if self.whole else c.head_dim, c) if c.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Seen) -> Tensor:
        B, T, _ = x.shape
        parts = self.qkv(x).view(B, T, -1, self.head_dim)
        q, k, v = parts.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            if self.whole:
                q, k = self.q_norm(q.flatten(2)).view_as(q), self.k_norm(k.flatten(2)).view_as(k)
            else:
                q, k = self.q_norm(q), self.k_norm(k)
        dropout = self.dropout if self.training else 0.0
        y = attend(rotate(q, cos, sin), rotate(k, cos, sin), v, seen, dropout, self.scale, self.cap)
        out: Tensor = self.out(y.reshape(B, T, -1))
        return out


class MLP(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.gate_up = Linear(c.dim, *((c.ff, c.ff) if c.gated else (c.ff,)), bias=c.mlp_bias)
        self.down = Linear(c.ff, c.dim, bias=c.mlp_bias)
        self.activation = None if (c.activation, c.gated, c.mlp_bias) == ("silu", True, False) else activation(c)

    def forward(self, x: Tensor) -> Tensor:
        if self.activation is None:
            return swiglu_linear(self.gate_up(x), self.down.weight, self.down.fp8)
        out: Tensor = self.down(self.activation(self.gate_up(x)))
        return out


class Block(nn.Module):
    """`view`: which of the model's (angles, what is seen) it looks through."""

    def __init__(self, c: ModelConfig, view: int = 0) -> None:
        super().__init__()
        before, after = c.norms != "post", c.norms != "pre"
        self.attention_norm = RMSNorm(c.dim, c) if before else None
        self.attention = Attention(c)
        self.attention_post_norm = RMSNorm(c.dim, c) if after else None
        self.mlp_norm = RMSNorm(c.dim, c) if before else None
        self.mlp = MLP(c)
        self.mlp_post_norm = RMSNorm(c.dim, c) if after else None
        self.dropout, self.view = c.dropout, view
        self.fused = False  # our own kernels, see fused.py
        self.products_kept = False  # by selective recomputation

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Seen, delta: Tensor | None = None) -> Any:
        """Fused: takes and gives (residual stream, what is still to be added to it)."""
        if self.fused:
            from stoker.training.model import fused  # Triton: on GPUs only

            return fused.block(self, x, delta, cos, sin, seen)
        y = self.attention(x if self.attention_norm is None else self.attention_norm(x), cos, sin, seen)
        x = x + self._drop(y if self.attention_post_norm is None else self.attention_post_norm(y))
        y = self.mlp(x if self.mlp_norm is None else self.mlp_norm(x))
        return x + self._drop(y if self.mlp_post_norm is None else self.mlp_post_norm(y))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class Decoder(nn.Module):
    """forward(inputs, targets) is the sum of the tokens' losses times `scale`; forward(inputs) the logits."""

    def __init__(self, c: ModelConfig, context_length: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        check_options(c, "model")
        self.config, self.context_length, self.dtype = c, context_length, dtype
        self.loss = "auto"  # compute.loss
        self.embed = nn.Embedding(c.vocab_size, c.dim)
        # rounded as the activations are, which is how models with such a scale were trained
        self.embedding_scale = float(torch.tensor(c.embedding_scale, dtype=dtype, device="cpu"))
        # What layers differ in beside their weights: window and rotary table. Most models have one view for all.
        views = [(c.window(layer), self._theta(layer)) for layer in range(c.layers)]
        kinds = list(dict.fromkeys(views))
        self.layers = nn.ModuleList(Block(c, kinds.index(view)) for view in views)
        self.norm = RMSNorm(c.dim, c)
        # One parameter has one name: sharding and `to_empty` part what is shared.
        self.head = None if c.tied else Linear(c.dim, c.vocab_size)
        self.windows = [window for window, _ in kinds]
        # Not buffers: DDP would send them around before every forward.
        self.tables = [self._table(theta) for _, theta in kinds]
        if self.embed.weight.device.type != "meta":
            self.place(self.embed.weight.device)

    def _theta(self, layer: int) -> float | None:
        """The base of the layer's rotary table where it is not the model's; None: it turns nothing."""
        if layer in self.config.unrotated:
            return None
        return self.config.window_theta if self.config.window(layer) else 0.0

    def _table(self, theta: float | None) -> tuple[Tensor, Tensor]:
        cos, sin = rotary_table(self.context_length, self.config, theta or 0.0)
        return (cos, sin) if theta is not None else (torch.ones_like(cos), torch.zeros_like(sin))

    def place(self, device: torch.device) -> None:
        """Onto its device; a model that was built on the meta device gets its memory here, and its numbers from `start`
        or a checkpoint.
        """
        if self.embed.weight.is_meta:
            self.to_empty(device=device)
        self.tables = [(cos.to(device), sin.to(device)) for cos, sin in self.tables]

    @property
    def head_weight(self) -> Tensor:
        return self.embed.weight if self.head is None else self.head.weight

    @torch.no_grad()
    def start(self, seed: int) -> None:
        """Fresh weights, drawn matrix by matrix on the device: the same for every number of ranks and both strategies."""
        device = self.tables[0][0].device
        generator = torch.Generator(device).manual_seed(seed)
        residual = self.config.init_std / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(0.0 if name.endswith(".bias") else 1.0 - self.config.norm_offset)
                continue
            std = residual if name.endswith(("attention.out.weight", "mlp.down.weight")) else self.config.init_std
            whole = torch.empty(parameter.shape, device=device).normal_(0.0, std, generator=generator)
            parameter.copy_(like(whole, parameter))

    def hidden(self, inputs: Tensor, packed: Documents | None = None) -> Tensor:
        x = self.embed(inputs).to(self.dtype)
        if self.embedding_scale != 1.0:
            x = x * self.embedding_scale
        if self.config.dropout:
            x = F.dropout(x, self.config.dropout, self.training)
        views = self._views(x, packed)  # once, not in each block
        if self.fused:
            return self._fused(x, views)
        for block in self.layers:
            x = block(x, *views[block.view])  # type: ignore[index]
        normed: Tensor = self.norm(x)
        return normed

    @property
    def fused(self) -> bool:
        return bool(self.layers[0].fused)

    def fuse(self, yes: bool) -> None:
        """Blocks by our own kernels, or by plain torch: what a replay or a drill looks into."""
        for block in self.layers:
            block.fused = yes  # type: ignore[assignment]

    def _fused(self, x: Tensor, views: list[tuple[Tensor, Tensor, Seen]]) -> Tensor:
        from stoker.training.model import fused

        delta: Tensor | None = None
        for block in self.layers:
            x, delta = block(x, *views[block.view], delta)  # type: ignore[index]
        assert delta is not None
        return fused.add_norm(x, delta, self.norm)

    def _views(self, x: Tensor, packed: Documents | None) -> list[tuple[Tensor, Tensor, Seen]]:
        """(cos, sin, what is seen) of each kind of layer."""
        c, length = self.config, x.shape[1]
        dropout = c.dropout if self.training else 0.0
        seen = {
            window: seen_by(packed, window, x, head_dim=c.head_dim, dropout=dropout, cap=c.attention_cap)
            for window in dict.fromkeys(self.windows)
        }
        places: Any = slice(length)
        if packed is not None:  # each document of a packed row counts its positions from 0
            place = torch.arange(length, device=x.device).expand_as(packed.segments)
            places = place - torch.where(begins(packed.segments), place, 0).cummax(dim=1).values
        return [
            (cos[places], sin[places], seen[window])
            for (cos, sin), window in zip(self.tables, self.windows, strict=True)
        ]

    def forward(
        self,
        inputs: Tensor,
        targets: Tensor | None = None,
        scale: Tensor | None = None,
        packed: Documents | None = None,
    ) -> Tensor:
        x, cap = self.hidden(inputs, packed), self.config.final_cap
        if targets is None:
            return capped(F.linear(x, self.head_weight.to(x.dtype)), cap)
        with scope("loss"):
            return linear_cross_entropy(x.flatten(0, 1), self.head_weight, targets.flatten(), scale, self.loss, cap)


def like(whole: Tensor, parameter: Tensor) -> Tensor:
    """Laid out as the parameter is: a rank's shard of a tensor that every rank has."""
    if not hasattr(parameter, "device_mesh"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)  # type: ignore[attr-defined]
