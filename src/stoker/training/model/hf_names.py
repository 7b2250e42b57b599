"""What `transformers` calls our tensors. Llama and Qwen3 share the names; ours that are fused are several of theirs,
one below the other.
"""

from __future__ import annotations

from collections.abc import Iterator

from stoker.contract.shape import shape
from stoker.training.model.config import ModelConfig

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@shape
class Part:
    name: str  # theirs
    shape: tuple[int, ...]


@shape
class Place:
    name: str  # ours
    parts: tuple[Part, ...]


def places(c: ModelConfig) -> Iterator[Place]:
    """Every tensor of the model once: a tied head is the embedding."""
    queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
    yield Place("embed.weight", (Part(EMBEDDING, (c.vocab_size, c.dim)),))
    for layer in range(c.layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"

        def place(name: str, *parts: tuple[str, tuple[int, ...]], ours: str = ours, theirs: str = theirs) -> Place:
            return Place(f"{ours}.{name}.weight", tuple(Part(f"{theirs}.{part}.weight", size) for part, size in parts))

        yield place("attention_norm", ("input_layernorm", (c.dim,)))
        fused = (
            ("self_attn.q_proj", (queries, c.dim)),
            ("self_attn.k_proj", (keys, c.dim)),
            ("self_attn.v_proj", (keys, c.dim)),
        )
        yield place("attention.qkv", *fused)
        yield place("attention.out", ("self_attn.o_proj", (c.dim, queries)))
        if c.qk_norm:
            yield place("attention.q_norm", ("self_attn.q_norm", (c.head_dim,)))
            yield place("attention.k_norm", ("self_attn.k_norm", (c.head_dim,)))
        yield place("mlp_norm", ("post_attention_layernorm", (c.dim,)))
        yield place("mlp.gate_up", ("mlp.gate_proj", (c.ff, c.dim)), ("mlp.up_proj", (c.ff, c.dim)))
        yield place("mlp.down", ("mlp.down_proj", (c.dim, c.ff)))
    yield Place("norm.weight", (Part("model.norm.weight", (c.dim,)),))
    if not c.tied:
        yield Place("head.weight", (Part(HEAD, (c.vocab_size, c.dim)),))
