"""Validation: nats per token and bits per byte, over the same samples whatever the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from stoker.contract.shape import shape
from stoker.training.data.reader import IGNORED
from stoker.training.loop.material import Rows
from stoker.training.parallel.group import Group


@shape
class Validation:
    loss: float  # nats per token
    bits_per_byte: float | None  # None: not of text
    tokens: int
    right: float | None = None  # share of pairs whose better answer scores higher
    more: Mapping[str, float] | None = None  # other means, by name


class Measure(Protocol):
    def __call__(self, model: nn.Module, samples: Rows, group: Group, *, tokens: int, micro: int) -> Validation: ...


@torch.no_grad()
def validate(model: nn.Module, samples: Rows, group: Group, *, tokens: int, micro: int) -> Validation:
    """Rank r takes samples r, r + ranks, …; every rank makes the same number of calls, as FSDP needs."""
    count = min(len(samples), max(tokens // samples.context, 1)) if tokens else len(samples)
    mine = np.arange(group.rank, count, group.world, dtype=np.int64)
    most = -(-count // group.world)
    calls = -(-most // micro)
    totals = torch.zeros(2, dtype=torch.float64, device=group.device)
    training = model.training
    model.eval()
    for call in range(calls):
        ids = mine[call * micro : (call + 1) * micro]
        inputs, targets, segments = padded(samples, ids, micro, group.device)
        loss = model(inputs, targets, None, segments)
        totals += torch.stack([loss.double(), (targets != IGNORED).sum().double()])
    model.train(training)
    total, learned = group.sum(totals).tolist()
    nats = total / learned if learned else math.nan
    return Validation(nats, nats / math.log(2) / samples.bytes_per_target, int(learned))


def padded(samples: Rows, ids: np.ndarray, micro: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    batch = samples.batch(ids if len(ids) else np.zeros(1, dtype=np.int64))
    rows = batch.inputs.shape[0]
    more = ((0, micro - rows), (0, 0))
    targets = np.pad(batch.targets, more, constant_values=IGNORED)
    if not len(ids):
        targets[:] = IGNORED
    segments = torch.from_numpy(np.pad(batch.segments, more)).to(device) if batch.segments is not None else None
    return torch.from_numpy(np.pad(batch.inputs, more)).to(device), torch.from_numpy(targets).to(device), segments
