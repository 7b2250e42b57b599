"""Pairs of answers as packed rows of tokens: better and worse lie side by side in one row, each a segment of its own.

The target at the better answer's last token is the place of the worse answer's last token; nothing else is learned.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from stoker.contract.errors import EX_DATAERR, EX_NOINPUT, EX_USAGE, Refusal, parsing
from stoker.contract.frozen import frozen
from stoker.contract.units import plural
from stoker.training.data.encode import pair_ids
from stoker.training.data.formats.format import Preference, Unusable
from stoker.training.data.formats.preferences import preference
from stoker.training.data.read import is_hopeless
from stoker.training.data.reader import IGNORED, Batch
from stoker.training.data.reasons import MOST_LONG, TOLERATED, Reasons
from stoker.training.data.rows import rows
from stoker.training.tokenizer import chat
from stoker.training.tokenizer.tokenizer import Tokenizer

Say = Callable[[str], None]
T = TypeVar("T")
Prompt = str | Sequence[dict[str, Any]]


@frozen
class Pair:
    """Arrays: a hundred thousand pairs as Python's integers would be gigabytes."""

    better: NDArray[np.int32]
    worse: NDArray[np.int32]
    kind: str
    learned: NDArray[np.bool_]  # of `better`: the tokens of the answer
    learned_worse: NDArray[np.bool_]

    @property
    def size(self) -> int:
        """The tokens of both answers with their prompts."""
        return len(self.better) + len(self.worse)


def messages_of(prompt: Prompt) -> list[tuple[str, bytes]]:
    """A text is the user's; a list is a conversation."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [(str(message["role"]), message["content"].encode()) for message in messages]


def asked(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """The conversation up to the answer."""
    return chat.prompt(tokenizer, messages_of(prompt))


def answered(tokenizer: Tokenizer, prompt: Prompt, answer: str) -> list[int]:
    """And up to the mark that ends it: there the score is read."""
    return chat.answered(tokenizer, messages_of(prompt), answer)


def lengths_of(path: str, tokenizer: Tokenizer) -> list[int]:
    """Tokens of each pair, both answers; rows that are no pairs are counted elsewhere."""
    found = []
    for number, row in rows(path):
        try:
            with parsing(f"{path}, row {number}", Unusable):
                pair = encode(preference(row), tokenizer)
        except Unusable:
            continue
        found.append(pair.size)
    return found


def pairs_of(
    path: str, held_out: str, tokenizer: Tokenizer, context: int, section: str, say: Say
) -> tuple[list[Pair], list[Pair]]:
    """Return the pairs to train on and the pairs to measure by: two files, or the last tenth of one is held out."""
    pairs, measured = _usable_pairs(path, held_out, tokenizer, context, section, say)
    return _split(list(pairs), list(measured), f"{section}.pairs {path}", section, say)


def pair_sizes(
    path: str,
    held_out: str,
    tokenizer: Tokenizer,
    context: int,
    section: str,
    tick: Callable[[], None],
    steps: Mapping[str, int],
) -> tuple[list[int], list[int]]:
    """Return the tokens of each pair that `pairs_of` returns, without keeping the pairs in memory.

    Of a file whose entry in `steps` is N only every Nth row is tokenized. Calls `tick` after each pair.
    """
    sizes: tuple[list[int], list[int]] = ([], [])
    files = _usable_pairs(path, held_out, tokenizer, context, section, lambda line: None, steps)
    for own, pairs in zip(sizes, files, strict=True):
        for pair in pairs:
            own.append(pair.size)
            tick()
    return _split(*sizes, f"{section}.pairs {path}", section, lambda line: None)


def _usable_pairs(
    path: str,
    held_out: str,
    tokenizer: Tokenizer,
    context: int,
    section: str,
    say: Say,
    steps: Mapping[str, int] | None = None,
) -> tuple[Iterable[Pair], Iterable[Pair]]:
    """Return the pairs of both files as iterators; that of an unnamed held-out file is empty."""

    def sampled(file: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
        return itertools.islice(rows(file), 0, None, (steps or {}).get(file, 1))

    if not path:
        raise Refusal(f"{section}.pairs is empty: name a file of rows with chosen and rejected", EX_USAGE)
    pairs = iterate_pairs(sampled(path), tokenizer, context, f"{section}.pairs {path}", say)
    if not held_out:
        return pairs, ()
    return pairs, iterate_pairs(sampled(held_out), tokenizer, context, f"{section}.held_out {held_out}", say)


def _split(pairs: list[T], held_out: list[T], where: str, section: str, say: Say) -> tuple[list[T], list[T]]:
    """Hold out the last tenth of `pairs` unless there are held-out ones."""
    say(f"{where}: {plural(len(pairs), 'pair')} in the format preference (chosen and rejected answers)")
    if held_out:
        return pairs, held_out
    if len(pairs) < 2:
        line = f"{where} has one pair, and one must be held out"
        raise Refusal(f"{line}: give more, or {section}.held_out", EX_DATAERR)
    count = max(len(pairs) // 10, 1)
    return pairs[:-count], pairs[-count:]


def read_pairs(
    numbered: Iterable[tuple[int, Mapping[str, Any]]], tokenizer: Tokenizer, context: int, where: str, say: Say
) -> list[Pair]:
    """Return the usable pairs of these rows; see `iterate_pairs`."""
    return list(iterate_pairs(numbered, tokenizer, context, where, say))


def iterate_pairs(
    numbered: Iterable[tuple[int, Mapping[str, Any]]], tokenizer: Tokenizer, context: int, where: str, say: Say
) -> Iterator[Pair]:
    """Yield the usable pairs of these rows.

    At the end it reports what was left out. Raises Refusal if 1 % of the rows or more are no pairs, or if more than half
    of them are longer than `context`.
    """
    chat.check(tokenizer)
    usable = 0
    wrong = Reasons()
    long = Reasons()
    for number, row in numbered:
        try:
            with parsing(f"{where}, row {number}", Unusable):
                pair = encode(preference(row), tokenizer)
        except Unusable as problem:
            wrong.add(str(problem), number)
            if is_hopeless(wrong.count, usable):
                line = (
                    f"{where}: {wrong.count:,} of its first {wrong.count + usable:,} rows are not usable pairs: {wrong}"
                )
                raise Refusal(line, EX_DATAERR) from problem
            continue
        if pair.size > context:
            long.add(too_long(context), number, pair.size)
        else:
            usable += 1
            yield pair
    total = usable + wrong.count + long.count
    if wrong.count:
        line = f"{where}: {wrong.count:,} of {total:,} rows are not usable pairs: {wrong}"
        if wrong.count >= TOLERATED * total:
            raise Refusal(f"{line}; that is 1 % or more: fix the file", EX_DATAERR)
        say(f"{line}; left out")
    if long.count:
        line = f"{where}: {long.count:,} of {total:,} pairs are too long: {long}"
        if not usable or long.count > MOST_LONG * total:
            raise Refusal(f"{line}; raise data.context_length: the longest needs {long.largest:,}", EX_DATAERR)
        say(f"{line}; left out, and the longest needs data.context_length {long.largest:,}")
    if not usable:
        raise Refusal(f"{where} has no rows", EX_NOINPUT)


def too_long(context: int) -> str:
    return f"both answers have more tokens than data.context_length {context}"


def encode(pair: Preference, tokenizer: Tokenizer) -> Pair:
    (better, learned), (worse, learned_worse) = pair_ids(pair, tokenizer)
    return Pair(better, worse, pair.kind, learned, learned_worse)


def pack_in_order(sizes: Sequence[int], context: int) -> list[list[int]]:
    """Return the indices of the pairs in each row: a new row begins where the next pair does not fit."""
    rows: list[list[int]] = []
    free = 0
    for index, size in enumerate(sizes):
        if size > free:
            rows.append([])
            free = context
        rows[-1].append(index)
        free -= size
    return rows


class PairRows:
    """As many pairs as fit in each row, in the order they came: the next row begins where one does not fit.

    `answers`: segments also say which tokens are an answer's, as 2 · segment + 1; all others are 2 · segment.
    """

    chat = packed = True
    bytes_per_target = 1.0

    def __init__(self, pairs: Sequence[Pair], context: int, pad: int, answers: bool = False) -> None:
        self.context, self._pad, self.pairs, self._answers = context, pad, pairs, answers
        rows = pack_in_order([pair.size for pair in pairs], context)
        self._rows = [[pairs[index] for index in row] for row in rows]

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
                for side, learned in ((pair.better, pair.learned), (pair.worse, pair.learned_worse)):
                    inputs[row, place : place + len(side)] = side
                    segments[row, place : place + len(side)] = 2 * segment + learned if self._answers else segment
                    place, segment = place + len(side), segment + 1
                    ends.append(place - 1)
                targets[row, ends[0]] = ends[1]
        return Batch(inputs, targets, segments)

    def digest(self) -> str:
        told = hashlib.sha256(f"{self.context} ".encode())
        for pair in self.pairs:
            told.update(np.array([len(pair.better), *pair.better, *pair.worse], dtype=np.int64).tobytes())
        return told.hexdigest()[:32]
