"""The decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU; Llama's and Qwen3's shapes are its settings.

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
from stoker.training.model.attention import attend, mask_of
from stoker.training.model.config import ModelConfig
from stoker.training.model.fp8 import fp8_linear
from stoker.training.model.loss import linear_cross_entropy
from stoker.training.model.swiglu import swiglu_linear


class Linear(nn.Linear):
    """No bias. The weight is cast to the activations' dtype: fp32 master, bf16 product. `parts`: rows of the maps fused
    into it.
    """

    def __init__(self, inputs: int, *parts: int) -> None:
        super().__init__(inputs, sum(parts), bias=False)
        self.parts = parts
        self.fp8 = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fp8:
            return fp8_linear(x, self.weight)
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight.float()).to(x.dtype)


def rotary_table(length: int, c: ModelConfig) -> tuple[Tensor, Tensor]:
    """cos and sin, [T, head_dim / 2], in fp32 throughout as transformers computes them: an exacter table would make
    other logits than theirs.
    """
    frequency = 1.0 / (c.rope_theta ** (torch.arange(0, c.head_dim, 2, dtype=torch.float32, device="cpu") / c.head_dim))
    if c.rope_factor != 1.0:
        turns = c.rope_original * frequency / (2 * math.pi)
        kept = ((turns - c.rope_low) / (c.rope_high - c.rope_low)).clamp(0, 1)
        frequency = (1 - kept) * frequency / c.rope_factor + kept * frequency
    angle = torch.outer(torch.arange(length, dtype=torch.float32, device="cpu"), frequency)
    return angle.cos(), angle.sin()


def rotate(x_BTHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE as transformers lays it out: the first half of a head turns with the second."""
    first, second = x_BTHD.float().chunk(2, dim=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_BTHD.dtype)


class Attention(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.dropout = c.heads, c.kv_heads, c.head_dim, c.dropout
        self.qkv = Linear(c.dim, c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim)
        self.out = Linear(c.heads * c.head_dim, c.dim)
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        B, T, _ = x.shape
        parts = self.qkv(x).view(B, T, -1, self.head_dim)
        q, k, v = parts.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        y = attend(rotate(q, cos, sin), rotate(k, cos, sin), v, mask, self.dropout if self.training else 0.0)
        out: Tensor = self.out(y.reshape(B, T, -1))
        return out


class MLP(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.gate_up = Linear(c.dim, c.ff, c.ff)
        self.down = Linear(c.ff, c.dim)

    def forward(self, x: Tensor) -> Tensor:
        return swiglu_linear(self.gate_up(x), self.down.weight, self.down.fp8)


class Block(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(c.dim, c.norm_eps)
        self.attention = Attention(c)
        self.mlp_norm = RMSNorm(c.dim, c.norm_eps)
        self.mlp = MLP(c)
        self.dropout = c.dropout
        self.fused = False  # our own kernels, see fused.py
        self.products_kept = False  # by selective recomputation

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, delta: Tensor | None = None) -> Any:
        """Fused: takes and gives (residual stream, what is still to be added to it)."""
        if self.fused:
            from stoker.training.model import fused  # Triton: on GPUs only

            return fused.block(self, x, delta, cos, sin, mask)
        x = x + self._drop(self.attention(self.attention_norm(x), cos, sin, mask))
        return x + self._drop(self.mlp(self.mlp_norm(x)))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class Decoder(nn.Module):
    """forward(inputs, targets) is the sum of the tokens' losses times `scale`; forward(inputs) the logits."""

    def __init__(self, c: ModelConfig, context_length: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config, self.context_length, self.dtype = c, context_length, dtype
        self.loss = "auto"  # compute.loss
        self.embed = nn.Embedding(c.vocab_size, c.dim)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = RMSNorm(c.dim, c.norm_eps)
        self.head = (
            None if c.tied else Linear(c.dim, c.vocab_size)
        )  # one parameter has one name: sharding and `to_empty` part what is shared
        # Not buffers: DDP would send them around before every forward.
        self.cos, self.sin = rotary_table(context_length, c)
        if self.embed.weight.device.type != "meta":
            self.place(self.embed.weight.device)

    def place(self, device: torch.device) -> None:
        """Onto its device; a model that was built on the meta device gets its memory here, and its numbers from `start`
        or a checkpoint.
        """
        if self.embed.weight.is_meta:
            self.to_empty(device=device)
        self.cos, self.sin = self.cos.to(device), self.sin.to(device)

    @property
    def head_weight(self) -> Tensor:
        return self.embed.weight if self.head is None else self.head.weight

    @torch.no_grad()
    def start(self, seed: int) -> None:
        """Fresh weights, drawn matrix by matrix on the device: the same for every number of ranks and both strategies."""
        generator = torch.Generator(self.cos.device).manual_seed(seed)
        residual = self.config.init_std / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(1.0)
                continue
            std = residual if name.endswith(("attention.out.weight", "mlp.down.weight")) else self.config.init_std
            whole = torch.empty(parameter.shape, device=self.cos.device).normal_(0.0, std, generator=generator)
            parameter.copy_(like(whole, parameter))

    def hidden(self, inputs: Tensor, segments: Tensor | None = None) -> Tensor:
        x = self.embed(inputs).to(self.dtype)
        if self.config.dropout:
            x = F.dropout(x, self.config.dropout, self.training)
        cos, sin = self._angles(inputs.shape[1], segments)
        mask = mask_of(segments) if segments is not None else None  # once, not in each block
        if self.fused:
            return self._fused(x, cos, sin, mask)
        for block in self.layers:
            x = block(x, cos, sin, mask)
        normed: Tensor = self.norm(x)
        return normed

    @property
    def fused(self) -> bool:
        return bool(self.layers[0].fused)

    def fuse(self, yes: bool) -> None:
        """Blocks by our own kernels, or by plain torch: what a replay or a drill looks into."""
        for block in self.layers:
            block.fused = yes  # type: ignore[assignment]

    def _fused(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        from stoker.training.model import fused

        delta: Tensor | None = None
        for block in self.layers:
            x, delta = block(x, cos, sin, mask, delta)
        assert delta is not None
        return fused.add_norm(x, delta, self.norm)

    def _angles(self, length: int, segments: Tensor | None) -> tuple[Tensor, Tensor]:
        if segments is None:
            return self.cos[:length], self.sin[:length]
        # Each conversation of a packed row counts its positions from 0.
        place = torch.arange(length, device=segments.device).expand_as(segments)
        begins = (
            torch.where(F.pad(segments[:, 1:] != segments[:, :-1], (1, 0), value=True), place, 0).cummax(dim=1).values
        )
        return self.cos[place - begins], self.sin[place - begins]

    def forward(
        self, inputs: Tensor, targets: Tensor | None = None, scale: Tensor | None = None, segments: Tensor | None = None
    ) -> Tensor:
        x = self.hidden(inputs, segments)
        if targets is None:
            return F.linear(x, self.head_weight.to(x.dtype))
        with scope("loss"):
            return linear_cross_entropy(x.flatten(0, 1), self.head_weight, targets.flatten(), scale, self.loss)


def like(whole: Tensor, parameter: Tensor) -> Tensor:
    """Laid out as the parameter is: a rank's shard of a tensor that every rank has."""
    if not hasattr(parameter, "device_mesh"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)  # type: ignore[attr-defined]


def matmul_parameters(c: ModelConfig) -> int:
    """Weights that take part in a product for every token: the head once, the embedding (a lookup) not."""
    attention = c.dim * (c.heads + 2 * c.kv_heads) * c.head_dim + c.heads * c.head_dim * c.dim
    return c.layers * (attention + 3 * c.dim * c.ff) + c.dim * c.vocab_size


def flops_per_token(c: ModelConfig, context_length: int) -> int:
    """Forward and backward, attention counted in full as everybody does: 6·N + 12·L·heads·head_dim·T."""
    return 6 * matmul_parameters(c) + 12 * c.layers * c.heads * c.head_dim * context_length
