"""The model's shape once the tokenizer is known. No torch."""

from __future__ import annotations

from stoker.contract.names import EX_CONFIG, Refusal
from stoker.contract.shape import replace
from stoker.training.model.config import ModelConfig

ROUND = 64  # rows of the embedding: products with odd sizes are slow


def with_rows(told: ModelConfig, vocab_size: int) -> ModelConfig:
    rows = told.vocab_size or -(-vocab_size // ROUND) * ROUND
    if rows < vocab_size:
        raise Refusal(f"the model has {rows} rows of embedding and the tokenizer {vocab_size} tokens: they don't belong together", EX_CONFIG)
    return replace(told, vocab_size=rows)
