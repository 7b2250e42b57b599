"""What learns, a decoder unless a stage says otherwise: how its weights come and go, and how it is measured."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stoker.contract.frozen import frozen
from stoker.contract.progress import Progress
from stoker.contract.safe_io import write_atomic
from stoker.training.data.reader import IGNORED
from stoker.training.loop.feeder import Rows, padded
from stoker.training.loop.samples import Example, from_chats
from stoker.training.model import hf
from stoker.training.model.attention import documents
from stoker.training.model.decoder import Decoder
from stoker.training.model.hf_write import CARD
from stoker.training.model.outside import Outside
from stoker.training.parallel.group import Group
from stoker.training.tokenizer.chat import write_template
from stoker.training.tokenizer.tokenizer import load as load_tokenizer

Say = Callable[[str], None]


@frozen
class Validation:
    loss: float  # nats per token
    bits_per_byte: float | None  # None: not of text
    tokens: int
    right: float | None = None  # share of pairs whose better answer scores higher
    more: Mapping[str, float] | None = None  # other means, by name


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
    with Progress("validation", count, unit="rows") as progress:
        for call in range(calls):
            ids = mine[call * micro : (call + 1) * micro]
            inputs, targets, segments = padded(samples, ids, micro, group.device)
            loss = model(inputs, targets, None, documents(segments, group.device))
            totals += torch.stack([loss.double(), (targets != IGNORED).sum().double()])
            progress.at(min((call + 1) * micro * group.world, count))
    model.train(training)
    total, learned = group.sum(totals).tolist()
    nats = total / learned if learned else math.nan
    return Validation(nats, nats / math.log(2) / samples.bytes_per_target, int(learned))


@frozen
class Beside:
    """What lies beside an export's weights."""

    tokenizer: str  # its folder
    taught_chat: bool  # conversations were learned, of a model that was made elsewhere
    card: str = ""  # README.md; empty: none

    def end_ids(self) -> tuple[int, ...]:
        """Tokens that the model was taught to end an answer with."""
        return load_tokenizer(self.tokenizer).stop_ids[:1] if self.taught_chat else ()

    def write(self, folder: str) -> None:
        if self.card:
            write_atomic(os.path.join(folder, CARD), self.card.encode("utf-8", "replace"))
        if self.taught_chat:
            write_template(folder, load_tokenizer(self.tokenizer))


def _save(model: Decoder, folder: str, beside: Beside, say: Say, write: bool) -> None:
    how: dict[str, Any] = {"tokenizer_folder": beside.tokenizer, "end_ids": beside.end_ids(), "more": beside.write}
    hf.save(model, folder, say=say, write=write, **how)


@frozen
class Learner:
    kind: type[Decoder] = Decoder
    outside: type[Outside] | None = Outside  # of transformers' modules; None: this stage can't learn with one
    load: Callable[[Decoder, str, Say], None] = hf.load
    # Model, folder, what lies beside the weights, say, whether this rank writes.
    save: Callable[[Decoder, str, Beside, Say, bool], None] = _save
    measure: Callable[..., Validation] = validate  # called as `validate` is
    # what a step's line says besides the loss: taken right after the step, read where a line is printed
    numbers: Callable[[Any], dict[str, Tensor]] = lambda model: {}
    compares: bool = False  # itself with the model it began with
    examples: Callable[[Rows, int], Iterator[Example]] | None = (
        from_chats  # of held-out rows; None: it gives no answers
    )
