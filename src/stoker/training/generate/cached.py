"""The decoder over a cache of keys and values: the sums and options of Decoder.hidden, without gradients."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.contract import host_memory
from stoker.contract.errors import EX_UNAVAILABLE, Refusal
from stoker.contract.frozen import frozen
from stoker.contract.units import format_bytes
from stoker.training.generate import plain
from stoker.training.generate.config import kernels_lack
from stoker.training.model.adapters import merged
from stoker.training.model.config import ModelConfig
from stoker.training.model.decoder import Block, Decoder
from stoker.training.model.experts import mixture
from stoker.training.model.linear import LayerNorm, Linear, RMSNorm, activation
from stoker.training.model.loss import capped
from stoker.training.model.maps import by_codes
from stoker.training.model.nf4 import Joined
from stoker.training.model.pieces import give_back, whole

# queries [rows · tokens, heads, head_dim], a layer's cache and its view -> [rows · tokens, heads · head_dim]
Attention = Callable[[Tensor, Tensor, int], Tensor]
Angles = list[tuple[Tensor, Tensor]]  # cos and sin of each view


@frozen
class Dense:
    """A product with a weight in the activations' dtype."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@frozen
class Coded:
    """A product with a weight in 4 bits, and with the adapter beside it."""

    layer: Linear
    bias: Tensor | None
    dtype: torch.dtype
    codes: tuple[Joined, ...] = ()  # of a layer in shards: all of them
    made: tuple[Tensor, Tensor] | None = None  # the same of its adapter, in this dtype

    def __call__(self, x: Tensor) -> Tensor:
        y = by_codes(self.codes, x) if self.codes else self.layer.by_codes(x)
        if self.bias is not None:
            y += self.bias
        adapter = self.layer.adapter
        made = None if adapter is None else self.made or adapter.made
        if adapter is not None and made is not None:
            small, wide = made
            y.addmm_(x @ small.t(), wide.t(), alpha=adapter.scale)
        return y

    def refresh(self) -> None:
        adapter = self.layer.adapter
        if adapter is not None and self.made is not None:
            adapter.put(self.made, whole(adapter.a), whole(adapter.up))
        elif adapter is not None:
            adapter.matrices(self.dtype)

    @property
    def copied_bytes(self) -> int:
        tensors = [tensor for one in self.codes for tensor in (one.codes, one.scales, one.second)]
        return sum(tensor.nbytes for tensor in (*tensors, *(self.made or ())))


Product = Dense | Coded


@frozen
class Layer:
    """None where the block has no such norm or router. With a router: its experts'. A LayerNorm: [2, width]."""

    attention_norm: Tensor | None
    qkv: Product
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]: each head's row, so that queries and keys are one product
    out: Product
    attention_post_norm: Tensor | None
    mlp_norm: Tensor | None
    gate_up: Product
    down: Product
    mlp_post_norm: Tensor | None
    router: Tensor | None
    view: int


class Weights:
    """The decoder's weights in the activations' dtype, cast once per update and not once per token. Where a parameter
    has that dtype already (fp32 on CPUs) it is used itself. Copies stay where they are: CUDA graphs keep addresses. A
    layer with an adapter, or in 4 bits, has a copy that is both together, unless `codes` are to be read as they are. Of a
    model in shards every weight is a copy, gathered one at a time, codes as codes; all ranks make and refresh theirs together.
    All of them are on the device that computes, also where the model's own are kept in host memory (parallel.offload).
    """

    def __init__(self, model: Decoder, vocab: int, codes: bool = False, streamed: bool = False) -> None:
        """`streamed`: of a model in shards, a block's weights are gathered whenever it computes, and given up then."""
        self._model, self._vocab, self.config, self._streamed = model, vocab, model.config, streamed
        self.tables, self.windows, self.embedding_scale = model.tables, model.windows, model.embedding_scale
        self.eps, self._codes, self._device = model.config.norm_eps, codes, model.device
        self._take()

    @torch.no_grad()
    def _take(self) -> None:
        model, dtype = self._model, self._model.dtype
        give_back(model)
        self._copies: list[tuple[Tensor, Tensor, float]] = []
        self._shared: list[tuple[Tensor, Tensor]] = []
        self._merged: list[tuple[Tensor, Linear]] = []
        self._coded: list[Coded] = []
        self.embed = self._cast(model.embed.weight, dtype)
        head = self.embed if model.head is None else self._cast(model.head.weight, dtype)
        self.head = head[: self._vocab]
        self.positions = None if model.positions is None else self._cast(model.positions.weight, dtype)
        self.norm = self._norm(model.norm)
        blocks = [block for block in model.layers if isinstance(block, Block)]
        self.layers: Iterable[Layer] = _Streamed(self, blocks)
        if not self._streamed:
            self.layers = [self._layer(block, dtype) for block in blocks]
        self.refresh(first=True)

    @torch.inference_mode(False)  # whose tensors FSDP2's are not
    @torch.no_grad()
    def gathered(self, block: Block) -> Layer:
        """A copy of its own, which nobody refreshes. All ranks ask for it."""
        kept = self._copies, self._shared, self._merged, self._coded
        self._copies, self._shared, self._merged, self._coded = [], [], [], []
        layer = self._layer(block, self._model.dtype)
        self.refresh(first=True)
        self._copies, self._shared, self._merged, self._coded = kept
        return layer

    def _cast(self, parameter: Tensor, dtype: torch.dtype, offset: float = 0.0) -> Tensor:
        usable = parameter.dtype == dtype and parameter.device == self._device and parameter.is_contiguous()
        if usable and not hasattr(parameter, "device_mesh") and not offset:
            self._shared.append((parameter.detach(), parameter))
            return self._shared[-1][0]
        ours = torch.empty(parameter.shape, dtype=dtype, device=self._device)
        self._copies.append((ours, parameter, offset))
        return ours

    def _norm(self, norm: RMSNorm | LayerNorm | None) -> Tensor | None:
        if norm is None or isinstance(norm, RMSNorm):
            return None if norm is None else self._cast(norm.weight, torch.float32, norm.offset)
        both = torch.empty(2, len(norm.weight), device=self._device)
        self._copies += [(both[0], norm.weight, norm.offset), (both[1], norm.bias, 0.0)]
        return both

    def _linear(self, linear: Linear, dtype: torch.dtype) -> Product:
        bias = None if linear.bias is None else self._cast(linear.bias, dtype)
        if linear.adapter is None and not linear.has_codes:
            return Dense(self._cast(linear.weight, dtype), bias)
        if self._codes and linear.has_rows_of_codes:
            self._coded.append(self._gathered(linear, bias, dtype) if linear.cut else Coded(linear, bias, dtype))
            return self._coded[-1]
        size = (linear.out_features, linear.in_features)
        weight = torch.empty(size, dtype=dtype, device=self._device)
        self._merged.append((weight, linear))
        return Dense(weight, bias)

    def _gathered(self, linear: Linear, bias: Tensor | None, dtype: torch.dtype) -> Coded:
        """Codes never change: they are gathered once."""
        assert linear.cut is not None
        codes, adapter, made = linear.cut.joined(whole), linear.adapter, None
        if adapter is not None:
            small = torch.empty(adapter.a.shape, dtype=dtype, device=self._device)
            made = small, small.new_zeros(adapter.outputs, len(small))
        return Coded(linear, bias, dtype, codes, made)

    def _layer(self, block: Block, dtype: torch.dtype) -> Layer:
        attention, experts, qk_norm = block.attention, block.experts, None
        router: Tensor | None = None
        wide: Product
        narrow: Product
        if experts is not None:
            router = self._cast(experts.router.weight, dtype)
            wide, narrow = (Dense(self._cast(part.weight, dtype)) for part in (experts.gate_up, experts.down))
        else:
            assert block.mlp is not None
            wide, narrow = (self._linear(part, dtype) for part in (block.mlp.gate_up, block.mlp.down))
        if attention.q_norm is not None and attention.k_norm is not None:
            heads, kv_heads, head_dim = attention.heads, attention.kv_heads, attention.head_dim
            qk_norm = torch.empty(heads + kv_heads, head_dim, device=self._device)
            for rows, norm in ((qk_norm[:heads], attention.q_norm), (qk_norm[heads:], attention.k_norm)):
                self._copies.append((rows, norm.weight, norm.offset))
        return Layer(
            self._norm(block.attention_norm),
            self._linear(attention.qkv, dtype),
            qk_norm,
            self._linear(attention.out, dtype),
            self._norm(block.attention_post_norm),
            self._norm(block.mlp_norm),
            wide,
            narrow,
            self._norm(block.mlp_post_norm),
            router,
            block.view,
        )

    @torch.no_grad()
    def refresh(self, first: bool = False) -> bool:
        """After the parameters changed. False: some lie elsewhere now, and what kept an address must forget it."""
        if any(ours.data_ptr() != parameter.data_ptr() for ours, parameter in self._shared):
            self._take()
            return False
        for ours, parameter, offset in self._copies:
            numbers = self._numbers(parameter)
            ours.copy_(numbers.view(-1, ours.shape[-1]) if numbers.dim() < ours.dim() else numbers)
            if offset:
                ours += offset
        for ours, linear in self._merged:
            if linear.adapter is not None or first:
                merged(linear, ours)
        for product in self._coded:
            product.refresh()
        return True

    def _numbers(self, parameter: Tensor) -> Tensor:
        """As the model computes with them."""
        gathered_in = self._model.gathered_in
        if gathered_in is None or not hasattr(parameter, "device_mesh"):
            return whole(parameter)
        return whole(parameter.to(gathered_in))

    @property
    def merged_bytes(self) -> int:
        return sum(ours.nbytes for ours, _ in self._merged)

    @property
    def copied_bytes(self) -> int:
        """Of all that is not the model's own."""
        coded = sum(product.copied_bytes for product in self._coded)
        return self.merged_bytes + coded + sum(ours.nbytes for ours, _, _ in self._copies)


class _Streamed:
    """Blocks, one after the other."""

    def __init__(self, weights: Weights, blocks: Sequence[Block]) -> None:
        self._weights, self._blocks = weights, blocks

    def __iter__(self) -> Iterator[Layer]:
        return map(self._weights.gathered, self._blocks)


def _refuse_beyond_memory(needed: int, tokens: int) -> None:
    """A model of few and wide columns is small, and what it keeps of each token is not."""
    free = host_memory.read_memory()[1]
    if needed > free:
        line = f"keys and values of {tokens:,} tokens take {format_bytes(needed)} of memory, and {format_bytes(free)} is free here"
        raise Refusal(f"{line}: take a shorter context or fewer answers at once, or a smaller model", EX_UNAVAILABLE)


class Cache:
    """One block of memory for keys and values of all layers."""

    def __init__(self, w: Weights, rows: int, length: int) -> None:
        c = w.config
        # Zeros: a slot that nobody wrote is multiplied by 0, and what happens to lie in fresh memory may be NaN.
        size = (c.layers, 2, rows, c.kv_heads, length, c.head_dim)
        if w.embed.device.type == "cpu":
            _refuse_beyond_memory(math.prod(size) * w.embed.dtype.itemsize, rows * length)
        self.kv = torch.zeros(size, dtype=w.embed.dtype, device=w.embed.device)
        self.length = length


def seen(slots: Tensor, lengths: Tensor, answers_from: int | Tensor, newest: int | Tensor, window: int = 0) -> Tensor:
    """[rows, slots]: which of them the token in slot `newest` sees."""
    tokens = (slots < lengths[:, None]) | ((slots >= answers_from) & (slots <= newest))
    if not window:
        return tokens
    place = torch.where(slots < answers_from, slots, lengths[:, None] + slots - answers_from)
    return tokens & (place > lengths[:, None] + newest - answers_from - window)


def as_mask(slots_seen: Tensor, dtype: torch.dtype) -> Tensor:
    """[rows, 1, 1, slots]: 0 where a slot is seen, -inf elsewhere."""
    zeros = torch.zeros(slots_seen.shape, dtype=dtype, device=slots_seen.device)
    return zeros.masked_fill_(~slots_seen, float("-inf"))[:, None, None, :]


def kernels_for(c: ModelConfig, length: int, device: torch.device) -> Any:
    """The module of kernels that answers of that model are written with, prompt and answer of `length`; None: plain torch."""
    if device.type != "cuda":
        return None
    lacks = kernels_lack(c, length)
    if lacks:
        print(f"the generation kernels don't support {lacks} yet; using plain torch", file=sys.stderr, flush=True)
        return None
    return import_module("stoker.training.generate.kernel")  # Triton: on GPUs only


class Blocks:
    """`ops`: plain or kernel, what lies between the products. `captured`: on GPUs, `run` is part of a CUDA graph."""

    def __init__(self, w: Weights, ops: Any, captured: bool = False) -> None:
        self._weights, self._ops, self._captured = w, ops, captured
        c = w.config
        self._activate = ops.swiglu if (c.activation, c.gated) == ("silu", True) else activation(c)
        self._turn = functools.partial(plain.turn, whole=True) if c.qk_norm_whole else ops.turn

    def angles(self, prepare: Callable[[Tensor], Tensor]) -> Angles:
        """The rotary tables of half heads as `turn` takes them: whole heads, the first half's sine negative."""
        return [whole_heads(prepare(cos), prepare(sin)) for cos, sin in self._weights.tables]

    def run(
        self, ids: Tensor, places: Tensor, angles: Angles, kv: Tensor, begin: int | Tensor, tokens: int,
        attention: Attention,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """(residual stream, what is still to be added to it) of ids [rows · tokens], which are at `places` of their rows.
        Their keys and values go to slots of `kv` from `begin` on; of a single row, to the slots [tokens] that `begin` has.
        """
        w, ops, heads = self._weights, self._ops, self._weights.config.heads
        x = F.embedding(ids, w.embed)
        if w.embedding_scale != 1.0:
            x = x * w.embedding_scale
        if w.positions is not None:  # what only fills up a prompt may lie beyond the last row
            x = x + w.positions[places.clamp(max=len(w.positions) - 1)]
        turns = [(cos[places], sin[places]) for cos, sin in angles]
        delta: Tensor | None = None
        for layer, cached in zip(w.layers, kv, strict=True):
            x, normed = ops.add_norm(x, delta, layer.attention_norm, w.eps)
            qkv = layer.qkv(normed)
            q = self._turn(qkv, *turns[layer.view], layer.qk_norm, heads, w.eps, cached, begin, tokens)
            delta = layer.out(attention(q, cached, layer.view))
            if layer.attention_post_norm is not None:
                delta = plain.add_norm(delta, None, layer.attention_post_norm, w.eps)[1]
            x, normed = ops.add_norm(x, delta, layer.mlp_norm, w.eps)
            delta = self._mlp(layer, normed)
            if layer.mlp_post_norm is not None:
                delta = plain.add_norm(delta, None, layer.mlp_post_norm, w.eps)[1]
        return x, delta

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        if layer.router is None:
            return layer.down(self._activate(layer.gate_up(x)))
        captured = self._captured and x.is_cuda
        assert isinstance(layer.gate_up, Dense) and isinstance(layer.down, Dense), "experts have 16 bits"
        weights = (layer.router, layer.gate_up.weight, layer.down.weight)
        return mixture(self._weights.config, x, *weights, captured=captured)[0]

    def logits(self, x: Tensor, delta: Tensor | None) -> Tensor:
        w = self._weights
        return capped(F.linear(self._ops.add_norm(x, delta, w.norm, w.eps)[1], w.head), w.config.final_cap)


def whole_heads(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
