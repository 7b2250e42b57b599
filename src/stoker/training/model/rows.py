"""The model's shape once the tokenizer is known, and how many parameters it has. No torch."""

from __future__ import annotations

from stoker.contract.names import EX_CONFIG, Refusal
from stoker.contract.shape import replace
from stoker.training.model.config import ModelConfig

ROUND = 64  # rows of the embedding: products with odd sizes are slow


def with_rows(told: ModelConfig, vocab_size: int) -> ModelConfig:
    rows = told.vocab_size or -(-vocab_size // ROUND) * ROUND
    if rows < vocab_size:
        raise Refusal(
            f"the model has {rows} rows of embedding and the tokenizer {vocab_size} tokens: they don't belong together",
            EX_CONFIG,
        )
    return replace(told, vocab_size=rows)


def parameters(model: ModelConfig) -> int:
    """Of a decoder with this shape, `vocab_size` included."""
    block = model.dim * model.head_dim * 2 * (model.heads + model.kv_heads) + 3 * model.dim * model.ff + 2 * model.dim
    norms = 2 * model.head_dim if model.qk_norm else 0
    return model.layers * (block + norms) + model.dim + model.vocab_size * model.dim * (1 if model.tied else 2)
