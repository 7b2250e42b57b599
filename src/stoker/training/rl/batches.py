"""Answers as micro-batches: sorted by length, padded on the right to a multiple of 16, so that there are few shapes and
little padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from stoker.contract.shape import shape

MULTIPLE = 16


@shape
class Row:
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    advantage: float


@shape
class Batch:
    inputs: Tensor  # [B, T]; padding is behind what is read, and attention is causal: it needs no mask
    where: Tensor  # [N]: flat places in [B, T] whose successors are the answers' tokens
    targets: Tensor  # [N]
    advantages: Tensor  # [N]
    counted: Tensor  # [N]: 1; 0 in the batch of a rank that has none
    old: Tensor | None = None  # [N]: log-probabilities when the answers were sampled; None: those of this very pass
    reference: Tensor | None = None


def arrange(rows: Sequence[Row], micro: int, context: int, device: torch.device) -> list[Batch]:
    """`context`: the longest a row may become. At least one batch: a rank without answers takes part in the exchange
    too, with a token that counts 0.
    """
    if not rows:
        return [_batch([Row((0,), (0,), 0.0)], context, device, 0.0)]
    ordered = sorted(
        rows, key=lambda row: len(row.prompt) + len(row.answer)
    )  # stable: the same rows give the same batches
    return [_batch(ordered[begin : begin + micro], context, device, 1.0) for begin in range(0, len(ordered), micro)]


def _batch(rows: Sequence[Row], context: int, device: torch.device, counted: float) -> Batch:
    longest = max(len(row.prompt) + len(row.answer) - 1 for row in rows)  # the last token is predicted, not read
    T = min(-(-longest // MULTIPLE) * MULTIPLE, context)
    inputs = np.zeros((len(rows), T), dtype=np.int64)
    where = []
    for number, row in enumerate(rows):
        read = (*row.prompt, *row.answer[:-1])
        inputs[number, : len(read)] = read
        begin = number * T + len(row.prompt) - 1
        where.append(np.arange(begin, begin + len(row.answer)))
    targets = np.concatenate([np.asarray(row.answer, dtype=np.int64) for row in rows])
    advantages = np.repeat([row.advantage for row in rows], [len(row.answer) for row in rows]).astype(np.float32)
    weights = np.full(len(targets), counted, dtype=np.float32)
    put = [torch.from_numpy(one).to(device) for one in (inputs, np.concatenate(where), targets, advantages, weights)]
    return Batch(*put)
