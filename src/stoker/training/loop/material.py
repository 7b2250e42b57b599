"""What a job learns from: rows by their number, and the tokenizer they were made with."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.contract.shape import shape
from stoker.training.data.prepared import Prepared
from stoker.training.data.reader import IGNORED, Batch, Samples

HOST = torch.device("cpu")


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


def padded(
    samples: Rows, ids: NDArray[np.int64], rows: int, device: torch.device = HOST, *, pinned: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(inputs, targets, segments), `rows` of each: behind those of `ids` is padding, of which nothing is learned."""

    def table(array: NDArray[Any], filling: int) -> Tensor:
        found = torch.full((rows, array.shape[1]), filling, dtype=torch.from_numpy(array).dtype, pin_memory=pinned)
        found[: len(array)] = torch.from_numpy(array)
        return found.to(device)

    batch = samples.batch(ids if len(ids) else np.zeros(1, dtype=np.int64))
    targets = table(batch.targets, IGNORED)
    if not len(ids):
        targets.fill_(IGNORED)
    return table(batch.inputs, 0), targets, table(batch.segments, 0) if batch.segments is not None else None
