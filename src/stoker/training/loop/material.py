"""What a job learns from: rows by their number, and the tokenizer they were made with."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from stoker.contract.shape import shape
from stoker.training.data.prepared import Prepared
from stoker.training.data.reader import Batch, Samples


class Rows(Protocol):
    context: int
    chat: bool  # rows have targets that are not learned: a step counts those that are
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


def from_prepared(prepared: Prepared, context_length: int) -> Material:
    held_out = Samples(prepared, "validation", context_length) if prepared.validation_tokens > 1 else None
    return Material(
        prepared.key,
        prepared.vocab_size,
        prepared.tokenizer,
        prepared.tokenizer_digest,
        Samples(prepared, "train", context_length),
        held_out,
    )
