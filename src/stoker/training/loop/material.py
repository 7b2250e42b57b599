"""What a job learns from: rows by their number, and the tokenizer they were made with."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from stoker.contract.shape import shape
from stoker.training.data.config import DataConfig
from stoker.training.data.prepared import Prepared
from stoker.training.data.reader import Batch, Samples


class Rows(Protocol):
    context: int
    chat: bool  # rows have targets that are not learned: a step counts those that are
    packed: bool  # rows hold several documents, and tokens see only their own
    bytes_per_target: float

    def __len__(self) -> int: ...

    def batch(self, ids: NDArray[np.int64]) -> Batch: ...


@shape
class Material:
    key: str  # of these very bytes, in these rows
    vocab_size: int
    tokenizer: str  # its folder
    tokenizer_digest: str
    train: Rows
    held_out: Rows | None
    entries: tuple[int, ...] = ()  # samples of each entry of `data.path`


def from_prepared(prepared: Prepared, data: DataConfig) -> Material:
    """Other shares of a mixture are another order of the same samples."""

    def samples(split: str) -> Samples:
        return Samples(prepared, split, data.context_length, data.documents)

    held_out = samples("validation") if prepared.validation_tokens > 1 else None
    train = samples("train")
    return Material(
        " ".join((prepared.key, *data.mixture)),
        prepared.vocab_size,
        prepared.tokenizer,
        prepared.tokenizer_digest,
        train,
        held_out,
        tuple(train.entries),
    )
