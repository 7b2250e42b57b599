"""Pairs of answers as packed rows of tokens: better and worse lie side by side in one row, each a segment of its own.

The target at the better answer's last token is the place of the worse answer's last token in the row; all other targets
are not learned.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.contract.names import EX_DATAERR, Refusal
from stoker.contract.shape import shape
from stoker.training.data import jsonl
from stoker.training.data.reader import IGNORED, Batch
from stoker.training.tokenizer import chat
from stoker.training.tokenizer.tokenizer import Tokenizer

TOLERATED = 0.01  # a smaller share of rows may be unusable
Prompt = str | Sequence[dict[str, Any]]


@shape
class Pair:
    better: list[int]
    worse: list[int]
    kind: str


def messages_of(prompt: Any) -> list[tuple[str, bytes]]:
    """A text is the user's; a list is a conversation. Raises ValueError, in words."""
    if isinstance(prompt, str):
        return [("user", prompt.encode())]
    if not isinstance(prompt, (list, tuple)) or not prompt:
        raise ValueError("prompt is neither a text nor a list of messages")
    found = []
    for message in prompt:
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if role not in chat.ROLES or not isinstance(content, str):
            raise ValueError(f"a message with role {role!r}; there are {', '.join(chat.ROLES)}")
        found.append((str(role), content.encode()))
    return found


def asked(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """The conversation up to the answer."""
    return chat.prompt(tokenizer, messages_of(prompt))


def answered(tokenizer: Tokenizer, prompt: Prompt, answer: str) -> list[int]:
    """And up to the mark that ends it: there the score is read."""
    return chat.answered(tokenizer, messages_of(prompt), answer)


def lengths_of(path: str, tokenizer: Tokenizer) -> list[int]:
    """Tokens of each pair, both answers; rows that are no pairs are counted elsewhere."""
    found = []
    for _, line in jsonl.lines(path):
        try:
            row = jsonl.row(line)
            texts = [row["chosen"], row["rejected"]]
            found.append(sum(len(answered(tokenizer, row["prompt"], text)) for text in texts))
        except (ValueError, KeyError, TypeError, AttributeError, chat.Unfit):
            continue
    return found


def read_pairs(
    rows: Sequence[dict[str, Any]], tokenizer: Tokenizer, context: int, where: str, say: Callable[[str], None]
) -> list[Pair]:
    """Rows that are no pair, or too long, are counted and named; one in a hundred or more is refused."""
    chat.check(tokenizer)
    found: list[Pair] = []
    wrong: list[str] = []
    for number, row in enumerate(rows, 1):
        try:
            found.append(_pair(row, tokenizer, context))
        except (ValueError, chat.Unfit) as problem:
            wrong.append(f"row {number}: {problem}")
    if wrong:
        line = f"{where}: {len(wrong)} of {len(rows)} rows are no usable pairs ({'; '.join(wrong[:3])})"
        if len(wrong) >= TOLERATED * len(rows) or not found:
            raise Refusal(line, EX_DATAERR)
        say(f"{line}: left out")
    return found


def _pair(row: dict[str, Any], tokenizer: Tokenizer, context: int) -> Pair:
    for key in ("prompt", "chosen", "rejected"):
        if key not in row:
            raise ValueError(f"no {key}; found {', '.join(list(row)[:5]) or 'nothing'}")
    chosen, rejected = row["chosen"], row["rejected"]
    if not isinstance(chosen, str) or not isinstance(rejected, str):
        raise ValueError("chosen and rejected must be texts")
    if chosen == rejected:
        raise ValueError("chosen and rejected are the same text")
    better, worse = answered(tokenizer, row["prompt"], chosen), answered(tokenizer, row["prompt"], rejected)
    if len(better) + len(worse) > context:
        raise ValueError(
            f"both answers have {len(better) + len(worse)} tokens, more than data.context_length {context}"
        )
    return Pair(better, worse, str(row.get("kind", "all")))


class PairRows:
    """As many pairs as fit in each row, in the order they came: the next row begins where one does not fit."""

    chat = True
    bytes_per_target = 1.0

    def __init__(self, pairs: Sequence[Pair], context: int, pad: int) -> None:
        self.context, self._pad, self.pairs = context, pad, pairs
        self._rows: list[list[Pair]] = []
        room = 0
        for pair in pairs:
            size = len(pair.better) + len(pair.worse)
            if size > room:
                self._rows.append([])
                room = context
            self._rows[-1].append(pair)
            room -= size

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, ids: NDArray[np.int64]) -> Batch:
        inputs = np.full((len(ids), self.context), self._pad, dtype=np.int64)
        targets = np.full((len(ids), self.context), IGNORED, dtype=np.int64)
        segments = np.full((len(ids), self.context), -1, dtype=np.int32)
        for row, number in enumerate(ids.tolist()):
            place, segment = 0, 0
            for pair in self._rows[number]:
                ends = []
                for side in (pair.better, pair.worse):
                    inputs[row, place : place + len(side)] = side
                    segments[row, place : place + len(side)] = segment
                    place, segment = place + len(side), segment + 1
                    ends.append(place - 1)
                targets[row, ends[0]] = ends[1]
        return Batch(inputs, targets, segments)

    def digest(self) -> str:
        told = hashlib.sha256(f"{self.context} ".encode())
        for pair in self.pairs:
            told.update(np.array([len(pair.better), *pair.better, *pair.worse], dtype=np.int64).tobytes())
        return told.hexdigest()[:32]
