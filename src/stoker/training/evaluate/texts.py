"""Bits per byte of held-out text: comparable between models with unlike tokenizers, as nats per token are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from stoker.contract.names import EX_DATAERR, Refusal
from stoker.training.data.config import DataConfig
from stoker.training.data.ours import own_cache
from stoker.training.data.read import texts
from stoker.training.data.sources import find_sources
from stoker.training.data.units import split
from stoker.training.evaluate.likelihood import bits_per_byte, log_likelihoods, windows
from stoker.training.model.decoder import Decoder
from stoker.training.parallel.group import Group
from stoker.training.tokenizer.tokenizer import Tokenizer


def documents(path: str, data: DataConfig, say: Callable[[str], None]) -> Iterator[bytes]:
    """Whole texts of jsonl, parquet or text files."""
    sources = find_sources((path,), own_cache(data.cache, say), say, "evaluate.texts")
    begun = b""
    for span in split(sources, 0.0)[0]:
        for part, ends in texts(span, data.text_key):
            begun += part
            if ends:
                yield begun
                begun = b""


def measure(
    path: str,
    data: DataConfig,
    tokens: int,
    model: Decoder,
    tokenizer: Tokenizer,
    group: Group,
    say: Callable[[str], None],
) -> float:
    """Over `tokens` tokens; ranks share the windows."""
    rows, sizes = windows(tokenizer, documents(path, data, say), data.context_length, tokens)
    if not rows:
        raise Refusal(f"evaluate.texts {path} holds no text", EX_DATAERR)
    mine = range(group.rank, len(rows), group.world)
    found = sum(log_likelihoods(model, [rows[place] for place in mine]))
    totals = group.sum(
        torch.tensor([found, float(sum(sizes[place] for place in mine))], dtype=torch.float64, device=group.device)
    ).tolist()
    return bits_per_byte(*totals)
