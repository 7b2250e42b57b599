"""What a run needs to know of its tokenizer."""

from __future__ import annotations

from stoker.contract import limits
from stoker.contract.frozen import frozen


@frozen
class TokenizerConfig:
    path: str = limits.text_option("WHERE")(
        "a folder with tokenizer.json, a hub id, `bytes` (one token per byte), or empty: a byte-level BPE is trained on"
        " the data"
    )
    vocab_size: int = limits.Range(260, limits.MAX_COUNT)(
        "size of a tokenizer that is trained here, special tokens included", 32768
    )
    train_megabytes: int = limits.FROM_ONE("how much of the data a tokenizer is trained on, spread evenly over it", 256)
