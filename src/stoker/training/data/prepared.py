"""What `prepare` made: all a run needs to know of its data."""

from __future__ import annotations

import os
from typing import Any

from stoker.contract.names import EX_NOINPUT, Refusal
from stoker.contract.shape import shape
from stoker.training.data.shards import read_manifest

TOKENIZER = "tokenizer"  # the folder beside the shards: what made them


@shape
class Prepared:
    folder: str
    key: str
    kind: str
    context: int | None  # of chats, which are packed for one context; None for a stream
    tokenizer: str  # its folder
    tokenizer_digest: str
    vocab_size: int
    end_id: int
    train_tokens: int
    train_bytes: int
    train_documents: int
    validation_tokens: int
    validation_bytes: int
    validation_documents: int
    train_samples: int | None  # packed rows of chats; of a stream, the context decides
    validation_samples: int | None
    fill: float | None  # share of the packed rows that is not padding
    cut: int  # conversations that were too long
    dropped: int  # conversations with nothing to learn
    shards: int
    seconds: float  # that making it took
    fresh: bool = False  # made by this call


def open_prepared(folder: str) -> Prepared:
    """From a folder below cache/datasets/, without looking at its shards."""
    told = read_manifest(folder)
    if told is None:
        raise Refusal(f"{folder} holds no prepared data (no manifest.json); `stoker prepare` makes it", EX_NOINPUT)
    return from_manifest(folder, told)


def from_manifest(folder: str, told: dict[str, Any], fresh: bool = False) -> Prepared:
    splits = {name: told["splits"][name] for name in ("train", "validation")}
    counted = {
        f"{name}_{key}": about.get(key)
        for name, about in splits.items()
        for key in ("tokens", "bytes", "documents", "samples")
    }
    train = splits["train"]
    return Prepared(
        folder=folder,
        tokenizer=os.path.join(folder, TOKENIZER),
        fresh=fresh,
        fill=train.get("fill"),
        cut=train.get("cut", 0),
        dropped=train.get("dropped", 0),
        shards=sum(len(about["shards"]) for about in splits.values()),
        **counted,
        **{key: told[key] for key in ("key", "kind", "context", "tokenizer_digest", "vocab_size", "end_id", "seconds")},
    )
