"""A few held-out prompts, answered while a model is fine-tuned: what it says before, during and after.

Written by the model that learns, without a cache and without a second copy of its weights: a token is a pass over the
prompts, and a card that is full with training has room for that.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stoker.contract import layout
from stoker.contract.frozen import frozen
from stoker.contract.safe_io import APPEND
from stoker.training.data.reader import IGNORED
from stoker.training.loop.config import ANSWERED
from stoker.training.loop.feeder import Rows
from stoker.training.model.outside import Outside
from stoker.training.model.pieces import give_back
from stoker.training.tokenizer.tokenizer import Tokenizer

FILE = "samples.jsonl"
MULTIPLE = 64  # tokens of a row: one shape for a whole answer
SHOWN = 160  # characters of a text in the log


@frozen
class Example:
    prompt: tuple[int, ...]
    answer: tuple[int, ...]  # as the data has it


def from_chats(rows: Rows, count: int) -> Iterator[Example]:
    """Of the first conversations: up to the first answer, and that."""
    for number in range(len(rows) if count else 0):
        batch = rows.batch(np.array([number], dtype=np.int64))
        assert batch.segments is not None
        inputs, targets, segments = batch.inputs[0], batch.targets[0], batch.segments[0]
        for segment in np.unique(segments[segments >= 0]).tolist():
            (own,) = np.nonzero(segments == segment)
            learned = targets[own] != IGNORED
            if not learned.any():
                continue
            first = int(learned.argmax())
            length = int((~learned[first:]).argmax()) or int(len(own) - first)
            answer = targets[own][first : first + length]
            yield Example(tuple(inputs[own][: first + 1].tolist()), tuple(answer.tolist()))


def chosen(found: Iterator[Example], count: int, context: int) -> list[Example]:
    """The first that leave room for an answer."""
    some: list[Example] = []
    while len(some) < count and (example := next(found, None)) is not None:
        if len(example.prompt) + ANSWERED <= context:
            some.append(example)
    return some


@torch.no_grad()
def answers(
    model: Any, prompts: Sequence[Sequence[int]], stop: Sequence[int], vocab: int,
    stopping: Callable[[], bool] | None = None,
) -> list[list[int]]:  # fmt: skip
    """Greedy, ANSWERED at most; `stopping`: what there is by then."""
    device = next(model.parameters()).device if isinstance(model, Outside) else model.device
    rows = torch.arange(len(prompts))
    longest = max(map(len, prompts)) + ANSWERED
    ids = torch.zeros(len(prompts), min(-(-longest // MULTIPLE) * MULTIPLE, model.context_length), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(list(prompt))
    ids, rows = ids.to(device), rows.to(device)
    ends = torch.tensor(list(stop), device=device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    alive = torch.ones(len(prompts), dtype=torch.bool, device=device)
    training = model.training
    model.eval()
    with _uncompiled():
        for place in range(ANSWERED):
            at = lengths - 1 + place
            token = _logits(model, ids, rows, at)[:, :vocab].argmax(-1)
            ids[rows, at + 1] = token
            alive &= ~torch.isin(token, ends)
            if not alive.any() or (stopping is not None and stopping()):
                break
    give_back(model)
    model.train(training)
    written = [row[len(prompt) : len(prompt) + place + 1] for row, prompt in zip(ids.tolist(), prompts, strict=True)]
    return [row[: next((end for end, one in enumerate(row) if one in stop), None)] for row in written]


def _logits(model: Any, ids: Tensor, rows: Tensor, at: Tensor) -> Tensor:
    """After the token at place `at` of each row. What lies behind it is not seen."""
    if isinstance(model, Outside):
        return model.logits(ids)[rows, at]
    logits: Tensor = model.logits_at(ids, rows, at)
    return logits


def _uncompiled() -> AbstractContextManager[Any]:
    """Compiling blocks for another shape would take longer than the answers. Nothing is compiled without dynamo, whose import
    takes a second or two.
    """
    stance: Any = getattr(torch.compiler, "set_stance", None)
    return stance("force_eager") if stance is not None and "torch._dynamo" in sys.modules else nullcontext()


class SampleLog:
    def __init__(self, folder: str, examples: Sequence[Example], words: Tokenizer, say: Callable[[str], None]) -> None:
        """`folder`: nothing on ranks that only compute."""
        self._path, self._examples, self._words, self._say = folder and os.path.join(folder, FILE), examples, words, say

    def write(self, model: Any, step: int, stopping: Callable[[], bool] | None = None) -> None:
        words = self._words
        stop = [token for token in words.stop_ids if token >= 0]
        written = answers(model, [example.prompt for example in self._examples], stop, words.vocab_size, stopping)
        if not self._path or (stopping is not None and stopping()):
            return
        handle = os.open(self._path, APPEND, 0o600)
        with os.fdopen(handle, "a", encoding="utf-8") as file:
            for number, (example, ids) in enumerate(zip(self._examples, written, strict=True), 1):
                wanted = [token for token in example.answer if token not in stop]
                texts = [words.decode(list(some)) for some in (example.prompt, wanted, ids)]
                told = dict(zip(("prompt", "wanted", "answer"), texts, strict=True))
                file.write(json.dumps({"schema": layout.SCHEMA, "step": step, **told}, ensure_ascii=False) + "\n")
                when = f"after step {step}" if step else "before the first step"
                self._say(f"Sample {number} {when} | {_short(texts[0])} → {_short(texts[2])}")


def _short(text: str) -> str:
    """One line; of a long prompt its end says more than its beginning."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else f"… {line[-SHOWN:]}"
