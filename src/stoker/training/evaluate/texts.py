"""Bits per byte of held-out text: comparable between models with unlike tokenizers, as nats per token are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from stoker.contract.names import EX_DATAERR, Refusal
from stoker.training.config.schema import Config
from stoker.training.data.ours import own_cache
from stoker.training.data.read import texts
from stoker.training.data.sources import find_sources
from stoker.training.data.units import split
from stoker.training.evaluate.likelihood import bits_per_byte, log_likelihoods, windows
from stoker.training.model.decoder import Decoder
from stoker.training.parallel.group import Group
from stoker.training.tokenizer.tokenizer import Tokenizer


def documents(c: Config, say: Callable[[str], None]) -> Iterator[bytes]:
    """Whole texts of jsonl, parquet or text files."""
    sources = find_sources((c.evaluate.texts,), own_cache(c.data.cache, say), say, "evaluate.texts")
    begun = b""
    for span in split(sources, 0.0)[0]:
        for part, ends in texts(span, c.data.text_key):
            begun += part
            if ends:
                yield begun
                begun = b""


def measure(c: Config, model: Decoder, tokenizer: Tokenizer, group: Group, say: Callable[[str], None]) -> float:
    """Over `train.eval_tokens` tokens; ranks share the windows."""
    rows, sizes = windows(tokenizer, documents(c, say), c.data.context_length, c.train.eval_tokens)
    if not rows:
        raise Refusal(f"evaluate.texts {c.evaluate.texts} holds no text", EX_DATAERR)
    mine = range(group.rank, len(rows), group.world)
    found = sum(log_likelihoods(model, [rows[place] for place in mine]))
    totals = group.sum(
        torch.tensor([found, float(sum(sizes[place] for place in mine))], dtype=torch.float64, device=group.device)
    ).tolist()
    return bits_per_byte(*totals)
