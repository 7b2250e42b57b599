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
    block = tuple(_of_block(c))
    for layer in range(c.layers):
        for name, sizes in block:
            yield f"layers.{layer}.{name}", sizes
    yield "norm.weight", ((c.dim,),)
    if not c.tied:
        yield "head.weight", ((c.vocab_size, c.dim),)


def _of_block(c: ModelConfig) -> Iterator[tuple[str, tuple[Size, ...]]]:
    queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
    joined = (c.ff, c.ff) if c.gated else (c.ff,)

    def linear(name: str, inputs: int, outputs: tuple[int, ...], bias: bool) -> Iterator[tuple[str, tuple[Size, ...]]]:
        yield f"{name}.weight", tuple((rows, inputs) for rows in outputs)
        if bias:
            yield f"{name}.bias", tuple((rows,) for rows in outputs)

    if c.norms != "post":
        yield "attention_norm.weight", ((c.dim,),)
    yield from linear("attention.qkv", c.dim, (queries, keys, keys), c.qkv_bias)
    yield from linear("attention.out", queries, (c.dim,), c.out_bias)
    if c.qk_norm:
        yield "attention.q_norm.weight", ((queries if c.qk_norm_whole else c.head_dim,),)
        yield "attention.k_norm.weight", ((keys if c.qk_norm_whole else c.head_dim,),)
    if c.norms != "pre":
        yield "attention_post_norm.weight", ((c.dim,),)
    if c.norms != "post":
        yield "mlp_norm.weight", ((c.dim,),)
    yield from linear("mlp.gate_up", c.dim, joined, c.mlp_bias)
    yield from linear("mlp.down", c.ff, (c.dim,), c.mlp_bias)
    if c.norms != "pre":
        yield "mlp_post_norm.weight", ((c.dim,),)


def parameters(c: ModelConfig) -> int:
    """Of a decoder with this shape, `vocab_size` included."""
    return sum(math.prod(size) for _, sizes in tensors(c) for size in sizes)


def matmul_parameters(c: ModelConfig) -> int:
    """Weights that take part in a product for every token: the head once, the embedding (a lookup) not."""
    matrices = sum(math.prod(size) for _, sizes in _of_block(c) for size in sizes if len(size) == 2)
    return c.layers * matrices + c.dim * c.vocab_size


def flops_per_token(c: ModelConfig, context_length: int) -> int:
    """Forward and backward, attention counted in full as everybody does: 6·N + 12·L·heads·head_dim·T."""
    return 6 * matmul_parameters(c) + 12 * c.layers * c.heads * c.head_dim * context_length
