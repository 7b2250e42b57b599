"""What a model of some shape holds, without torch: its rows of embedding, its tensors, its size, its work per token."""

from __future__ import annotations

import math
from collections.abc import Iterator

from stoker.contract.names import EX_CONFIG, Refusal
from stoker.contract.shape import replace
from stoker.training.model.config import ModelConfig

ROUND = 64  # rows of the embedding: products with odd sizes are slow
Size = tuple[int, ...]


def with_rows(told: ModelConfig, vocab_size: int) -> ModelConfig:
    rows = told.vocab_size or -(-vocab_size // ROUND) * ROUND
    if rows < vocab_size:
        raise Refusal(
            f"the model has {rows} rows of embedding and the tokenizer {vocab_size} tokens: they don't belong together",
            EX_CONFIG,
        )
    return replace(told, vocab_size=rows)


def tensors(c: ModelConfig) -> Iterator[tuple[str, tuple[Size, ...]]]:
    """Name and size of every parameter; several sizes: the maps that are joined in it, one below the other."""
    yield "embed.weight", ((c.vocab_size, c.dim),)
    if c.positions == "learned":
        yield "positions.weight", ((c.position_rows, c.dim),)
    blocks = {routed: tuple(_of_block(c, routed)) for routed in (False, True) if c.experts or not routed}
    for layer in range(c.layers):
        for name, sizes in blocks[c.routed(layer)]:
            yield f"layers.{layer}.{name}", sizes
    yield from _norm(c, "norm", c.dim)
    if not c.tied:
        yield "head.weight", ((c.vocab_size, c.dim),)


def _norm(c: ModelConfig, name: str, width: int) -> Iterator[tuple[str, tuple[Size, ...]]]:
    yield f"{name}.weight", ((width,),)
    if c.norm_kind == "layer":
        yield f"{name}.bias", ((width,),)


def _linear(name: str, inputs: int, outputs: tuple[int, ...], bias: bool) -> Iterator[tuple[str, tuple[Size, ...]]]:
    yield f"{name}.weight", tuple((rows, inputs) for rows in outputs)
    if bias:
        yield f"{name}.bias", tuple((rows,) for rows in outputs)


def _of_block(c: ModelConfig, routed: bool) -> Iterator[tuple[str, tuple[Size, ...]]]:
    queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
    if c.norms != "post":
        yield from _norm(c, "attention_norm", c.dim)
    yield from _linear("attention.qkv", c.dim, (queries, keys, keys), c.qkv_bias)
    yield from _linear("attention.out", queries, (c.dim,), c.out_bias)
    if c.qk_norm:
        yield "attention.q_norm.weight", ((queries if c.qk_norm_whole else c.head_dim,),)
        yield "attention.k_norm.weight", ((keys if c.qk_norm_whole else c.head_dim,),)
    if c.norms != "pre":
        yield from _norm(c, "attention_post_norm", c.dim)
    if c.norms != "post":
        yield from _norm(c, "mlp_norm", c.dim)
    if routed:
        yield "experts.router.weight", ((c.experts, c.dim),)
        yield from _linear("experts.gate_up", c.dim, gate_up_rows(c, c.expert_ff) * c.experts, False)
        yield from _linear("experts.down", c.expert_ff, (c.dim,) * c.experts, False)
    else:
        yield from _linear("mlp.gate_up", c.dim, gate_up_rows(c, c.ff), c.mlp_bias)
        yield from _linear("mlp.down", c.ff, (c.dim,), c.mlp_bias)
    if c.norms != "pre":
        yield from _norm(c, "mlp_post_norm", c.dim)


def gate_up_rows(c: ModelConfig, ff: int) -> tuple[int, ...]:
    return (ff, ff) if c.gated else (ff,)


def parameters(c: ModelConfig) -> int:
    """Of a decoder with this shape, `vocab_size` included."""
    if c.stored:
        return c.stored
    return sum(math.prod(size) for _, sizes in tensors(c) for size in sizes)


def matmul_parameters(c: ModelConfig) -> int:
    """Weights that take part in a product for every token: the head once, the embedding (a lookup) not, and of experts
    those that a token is given to.
    """
    if c.stored:
        return c.stored
    routed = sum(c.routed(layer) for layer in range(c.layers)) if c.experts else 0
    total = c.dim * c.vocab_size
    for layers, kind in ((c.layers - routed, False), (routed, True)):
        for name, sizes in _of_block(c, kind) if layers else ():
            matrices = sum(math.prod(size) for size in sizes if len(size) == 2)
            chosen = name.startswith("experts.") and name != "experts.router.weight"
            total += layers * (matrices * c.experts_per_token // c.experts if chosen else matrices)
    return total


def flops_per_token(c: ModelConfig, context_length: int) -> int:
    """Forward and backward, attention counted in full as everybody does: 6·N + 12·L·heads·head_dim·T."""
    return 6 * matmul_parameters(c) + 12 * c.layers * c.heads * c.head_dim * context_length
