"""What a run needs to know of its tokenizer."""

from __future__ import annotations

from stoker.contract import limits
from stoker.contract.shape import option, shape


@shape
class TokenizerConfig:
    path: str = option(
        "a folder with tokenizer.json, a hub id, `bytes` (one token per byte), or empty: a byte-level BPE is trained on"
        " the data",
        default="",
        metavar="WHERE",
    )
    vocab_size: int = option(
        "size of a tokenizer that is trained here, special tokens included",
        default=32768,
        limit=limits.Range(260, limits.MANY),
    )
    train_megabytes: int = option(
        "how much of the data a tokenizer is trained on, spread evenly over it", default=256, limit=limits.FROM_ONE
    )
