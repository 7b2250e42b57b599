"""The decoder, plain: torch's own operations. Which options of the block a model uses is in its ModelConfig.

Weights are fp32 and are cast where they are used; activations have the dtype of `Decoder.dtype`. Queries, keys and
values are one matrix, gate and up another: one large product instead of three or two. Names of shapes: B batch, T
tokens, D width, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stoker.contract.errors import EX_CONFIG, Refusal
from stoker.training.forensics.trace import scope
from stoker.training.model.attention import Documents, Seen, attend, begins, rotary_table, rotate, seen_by
from stoker.training.model.config import ModelConfig, check_options
from stoker.training.model.experts import Experts, balance_loss
from stoker.training.model.linear import MLP, Linear, RMSNorm, norm_of
from stoker.training.model.loss import IGNORED, capped, linear_cross_entropy
from stoker.training.model.pieces import like

_INTO_RESIDUAL = ("attention.out.weight", "mlp.down.weight", "experts.down.weight")


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


class Block(nn.Module):
    """`view`: which of the model's (angles, what is seen) it looks through; `routed`: experts instead of one MLP."""

    def __init__(self, c: ModelConfig, view: int = 0, routed: bool = False) -> None:
        super().__init__()
        before, after = c.norms != "post", c.norms != "pre"
        self.attention_norm = norm_of(c.dim, c) if before else None
        self.attention = Attention(c)
        self.attention_post_norm = norm_of(c.dim, c) if after else None
        self.mlp_norm = norm_of(c.dim, c) if before else None
        self.mlp = None if routed else MLP(c)
        self.experts = Experts(c) if routed else None
        self.mlp_post_norm = norm_of(c.dim, c) if after else None
        self.dropout, self.view = c.dropout, view
        self.fused = False  # our own kernels, see fused.py
        self.products_kept = False  # by selective recomputation
        self.lean = False  # fused: the MLP's first product is made again in the backward pass

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        seen: Seen,
        delta: Tensor | None = None,
        counted: Tensor | None = None,
    ) -> Any:
        """Fused: takes and gives (residual stream, what is still to be added to it). With experts: their load behind."""
        if self.fused:
            from stoker.training.model import fused  # Triton: on GPUs only

            return fused.block(self, x, delta, cos, sin, seen, counted)
        y = self.attention(x if self.attention_norm is None else self.attention_norm(x), cos, sin, seen)
        x = x + self._drop(y if self.attention_post_norm is None else self.attention_post_norm(y))
        y = x if self.mlp_norm is None else self.mlp_norm(x)
        if self.experts is not None:
            y, load = self.experts(y, counted)
            return x + self._drop(y if self.mlp_post_norm is None else self.mlp_post_norm(y)), load
        assert self.mlp is not None
        y = self.mlp(y)
        return x + self._drop(y if self.mlp_post_norm is None else self.mlp_post_norm(y))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


def _on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on `device`. A meta tensor has no values, so it becomes uninitialized memory there."""
    if not tensor.is_meta:
        return tensor.to(device)
    if hasattr(tensor, "device_mesh"):
        return torch.empty_like(tensor, device=device)
    # Not empty_like: for a meta tensor it imports sympy, which takes half a second.
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def _table(rows: int, width: int) -> nn.Embedding:
    """Without numbers, as `Linear` is."""
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width))


class Decoder(nn.Module):
    """forward(inputs, targets) is the sum of the tokens' losses times `scale`; forward(inputs) the logits."""

    gathered_in: torch.dtype | None = None  # of weights in shards, in a pass; None: as they are
    own: tuple[str, ...] = ()  # names of parameters that no folder of a decoder has

    def __init__(self, c: ModelConfig, context_length: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        check_options(c, "model")
        self.config, self.context_length, self.dtype = c, context_length, dtype
        self.loss = "auto"  # compute.loss
        self.embed_on_host = False  # compute.embedding
        self.embed = _table(c.vocab_size, c.dim)
        self.positions = self._position_rows() if c.positions == "learned" else None
        # rounded as the activations are, which is how models with such a scale were trained
        self.embedding_scale = float(torch.tensor(c.embedding_scale, dtype=dtype, device="cpu"))
        # What layers differ in beside their weights: window and rotary table. Most models have one view for all.
        views = [(c.window(layer), self._theta(layer)) for layer in range(c.layers)]
        kinds = list(dict.fromkeys(views))
        self.layers = nn.ModuleList(Block(c, kinds.index(view), c.routed(at)) for at, view in enumerate(views))
        self.norm = norm_of(c.dim, c)
        # One parameter has one name: sharding and `to_empty` part what is shared.
        self.head = None if c.tied else Linear(c.dim, c.vocab_size)
        self.windows = [window for window, _ in kinds]
        # Not buffers: DDP would send them around before every forward.
        self.tables = [self._table(theta) for _, theta in kinds]
        self._rows: Tensor | None = None  # of the embedding, on their way to the GPU
        if self.embed.weight.device.type != "meta":
            self.place(self.embed.weight.device)

    def _position_rows(self) -> nn.Embedding:
        c = self.config
        if self.context_length > c.position_rows:
            raise Refusal(
                f"the model has {c.position_rows} learned positions, and the context has {self.context_length} tokens:"
                f" set data.context_length to {c.position_rows} or less",
                EX_CONFIG,
            )
        return _table(c.position_rows, c.dim)

    def _theta(self, layer: int) -> float | None:
        """The base of the layer's rotary table where it is not the model's; None: it turns nothing."""
        if layer in self.config.unrotated:
            return None
        return self.config.window_theta if self.config.window(layer) else 0.0

    def _table(self, theta: float | None) -> tuple[Tensor, Tensor]:
        cos, sin = rotary_table(self.context_length, self.config, theta or 0.0)
        return (cos, sin) if theta is not None else (torch.ones_like(cos), torch.zeros_like(sin))

    def place(self, device: torch.device, home: torch.device | None = None) -> None:
        """Move every parameter, buffer and table to `device`, where the model computes.

        What was built on the meta device gets uninitialized memory, to be filled by `start`, a folder or a checkpoint.
        `home` is the device of the weights where they are kept elsewhere (parallel.offload); an embedding that is
        looked up on the host (compute.embedding) stays in host memory.
        """
        weights_device = home or device
        on_host = {id(tensor) for tensor in self.embed.parameters()} if self.embed_on_host else set()

        def move(tensor: Tensor) -> Tensor:
            return _on_device(tensor, torch.device("cpu") if id(tensor) in on_host else weights_device)

        self._apply(move)  # type: ignore[no-untyped-call]
        self.tables = [(cos.to(device), sin.to(device)) for cos, sin in self.tables]

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.tables[0][0].device

    @property
    def head_weight(self) -> Tensor:
        return self.embed.weight if self.head is None else self.head.weight

    @torch.no_grad()
    def start(self, seed: int) -> None:
        """Fresh weights, drawn matrix by matrix on the device: the same for every number of ranks and both strategies."""
        device = self.device
        generator = torch.Generator(device).manual_seed(seed)
        residual = self.config.init_std / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(0.0 if name.endswith(".bias") else 1.0 - self.config.norm_offset)
                continue
            std = residual if name.endswith(_INTO_RESIDUAL) else self.config.init_std
            whole = torch.empty(parameter.shape, device=device).normal_(0.0, std, generator=generator)
            parameter.copy_(like(whole, parameter))

    def begin_own(self, folder: str) -> None:
        """First numbers of `own`; from the folder, where that has some."""

    def write_own(self, folder: str, own: Mapping[str, Tensor]) -> None:
        """Into a folder that `begin_own` reads. `own`: whole."""

    def hidden(self, inputs: Tensor, packed: Documents | None = None) -> Tensor:
        return self._run(inputs, packed, None)[0]

    def logits_at(self, inputs: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        """After the token in each row's place."""
        x = self._run(inputs, None, None)[0][rows, places]
        return capped(F.linear(x, self.head_weight.to(x.dtype)), self.config.final_cap)

    def _run(self, inputs: Tensor, packed: Documents | None, counted: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(what the head reads, the experts' load summed over layers)."""
        x = self._embedded(inputs).to(self.dtype)
        if self.embedding_scale != 1.0:
            x = x * self.embedding_scale
        views, places = self._views(x, packed)  # once, not in each block
        if self.positions is not None:
            x = x + self.positions.weight[places].to(self.dtype)
        if self.config.dropout:
            x = F.dropout(x, self.config.dropout, self.training)
        fused, delta, load = self.fused, None, None
        block: Any
        for block in self.layers:
            given = (x, *views[block.view])
            if block.experts is not None:
                x, *more, own = block(*given, delta, counted)
                delta, load = more[0] if more else None, own if load is None else load + own
            elif fused:
                x, delta = block(*given, delta)
            else:
                x = block(*given)
        if not fused:
            return self._before_head(self.norm(x)), load
        from stoker.training.model.fused import add_norm

        assert delta is not None
        return self._before_head(add_norm(x, delta, self.norm)), load

    def _before_head(self, x: Tensor) -> Tensor:
        return x if self.head is None else self.head.entered(x)

    def _embedded(self, inputs: Tensor) -> Tensor:
        if not self.embed_on_host:
            rows: Tensor = self.embed(inputs)
            return rows
        places = inputs.flatten().cpu()  # waits for the GPU, which has read the rows of the call before then
        if self._rows is None or len(self._rows) < len(places):
            size = (len(places), self.config.dim)
            self._rows = torch.empty(size, dtype=self.embed.weight.dtype, pin_memory=inputs.is_cuda)
        taken = torch.index_select(self.embed.weight, 0, places, out=self._rows[: len(places)])
        return taken.to(inputs.device, non_blocking=True, copy=True).view(*inputs.shape, -1)

    @property
    def fused(self) -> bool:
        return bool(self.layers[0].fused)

    def fuse(self, yes: bool) -> None:
        """Blocks by our own kernels, or by plain torch: what a replay or a drill looks into."""
        for block in self.layers:
            block.fused = yes  # type: ignore[assignment]

    def _views(self, x: Tensor, packed: Documents | None) -> tuple[list[tuple[Tensor, Tensor, Seen]], Any]:
        """((cos, sin, what is seen) of each kind of layer, index of each token's position)."""
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
        views = [
            (cos[places], sin[places], seen[window])
            for (cos, sin), window in zip(self.tables, self.windows, strict=True)
        ]
        return views, places

    def forward(
        self,
        inputs: Tensor,
        targets: Tensor | None = None,
        scale: Tensor | None = None,
        packed: Documents | None = None,
    ) -> Tensor:
        c, counted = self.config, None
        if targets is not None and c.router_aux and self.training:  # a row without a target is padding
            counted = (targets != IGNORED).any(1, keepdim=True).expand_as(targets)
        x, load = self._run(inputs, packed, counted)
        if targets is None:
            return capped(F.linear(x, self.head_weight.to(x.dtype)), c.final_cap)
        with scope("loss"):
            flat, goals = x.flatten(0, 1), targets.flatten()
            loss = linear_cross_entropy(flat, self.head_weight, goals, scale, self.loss, c.final_cap)
            if counted is None or load is None:
                return loss
            aux = c.router_aux * balance_loss(load, counted.sum().clamp(min=1), c) * (goals != IGNORED).sum()
            return loss + (aux if scale is None else aux * scale)
