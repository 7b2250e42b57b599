"""What training would make of a file: its format, its tokens, a few samples with the learned tokens, and which rows
would be left out and why. Nothing is written.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from stoker.contract.errors import EX_DATAERR, Refusal, parsing
from stoker.contract.frozen import frozen
from stoker.training.data.encode import Encoded, conversation_ids, pair_ids
from stoker.training.data.formats.format import Format, Row, Unusable, checked, text_of
from stoker.training.data.formats.table import AUTO, FORMATS, TEXT, known, recognise, recognise_any
from stoker.training.data.jsonl import utf8
from stoker.training.data.looks import as_text, check_head, refuse_binary
from stoker.training.data.read import HOPELESS_AFTER_ALL, key_names
from stoker.training.data.reasons import MOST_LONG, TOLERATED, Reason, Reasons
from stoker.training.data.rows import kind_of, rows
from stoker.training.data.unpack import open_unpacked, packing_of
from stoker.training.tokenizer import chat
from stoker.training.tokenizer.tokenizer import Tokenizer

SAMPLES = 3
SAMPLE_TOKENS = 400  # of a sample that are shown
ROWS_NAMED = 1000  # for each reason
PAIRS, CHATS, TEXTS = "pairs", "conversations", "texts"
_STRETCH = 1 << 20


@frozen
class Ask:
    tokenizer: Tokenizer
    context: int
    format: str = AUTO
    text_key: str = "text"
    most: int = 0  # rows that are looked at; 0: all


@frozen
class Sample:
    row: int
    what: str  # of a pair: chosen or rejected
    pieces: tuple[tuple[str, bool], ...]  # text, and whether it is learned
    cut: bool  # there is more


@frozen
class Shown:
    file: str
    format: str
    about: str
    view: str  # pairs, conversations or texts
    rows: int
    used: int
    tokens: int
    learned: int
    long: int  # conversations that lose their end
    refused: str  # why training does not take the file at all; empty: it does
    dropped: tuple[Reason, ...]
    samples: tuple[Sample, ...]


@frozen
class _Row:
    """One usable row as ids: a text, a conversation, or both answers of a pair."""

    parts: tuple[tuple[str, Encoded], ...]
    long: bool = False


@frozen
class _Counted:
    total: int
    used: int
    wrong: int  # that no context length makes usable
    mixed: int  # the first one of another format; 0: there is none


class _TooLong(Unusable):
    """Training leaves such rows out, however many."""


class _OtherFormat(Unusable):
    """Training on conversations refuses the file, unless `data.format` is given."""


def show(path: str, ask: Ask, say: Callable[[str], None]) -> Shown:
    if kind_of(path) == "text":
        return _text_file(path, ask)
    dropped = Reasons(ROWS_NAMED)
    samples: list[Sample] = []
    total = used = tokens = learned = long = wrong = mixed = 0
    made: Format | None = FORMATS.get(ask.format)
    view = TEXTS if ask.format == TEXT else _view(made)
    if made is not None:
        chat.check(ask.tokenizer)
    for number, row in rows(path):
        if ask.most and total == ask.most:
            say(f"{path}: only the first {ask.most:,} rows were looked at (--rows)")
            break
        total += 1
        if view is None:
            made, view = _recognised(row, ask.text_key)
            if view in (PAIRS, CHATS):
                chat.check(ask.tokenizer)
        try:
            if view is None:
                raise Unusable(f"no known format; its keys: {key_names(row)}")
            with parsing(f"{path}, row {number}", Unusable):
                found = _encoded(row, made, view, ask)
        except Unusable as problem:
            dropped.add(str(problem), number)
            if view is None and total == HOPELESS_AFTER_ALL:  # a file of another kind
                break
            wrong += not isinstance(problem, _TooLong)
            mixed = mixed or (number if isinstance(problem, _OtherFormat) else 0)
            continue
        used, long = used + 1, long + found.long
        for what, (ids, mask) in found.parts:
            tokens, learned = tokens + len(ids), learned + int(mask.sum())
            if used <= SAMPLES:
                samples.append(_sample(number, what, ids, mask, ask.tokenizer))
    if view is None:
        if not total:
            raise Refusal(f"{path} is empty: it has no rows", EX_DATAERR)
        raise Refusal(
            f"{path}: {dropped.all[0].why}; known: text: {ask.text_key}, {known()} (`stoker docs data`)", EX_DATAERR
        )
    name, about = (made.name, made.about) if made is not None else (TEXT, f"the column {ask.text_key}")
    refused = _refused(view, _Counted(total, used, wrong, mixed if ask.format == AUTO else 0))
    left_out, shown = tuple(dropped.all), tuple(samples)
    return Shown(path, name, about, view, total, used, tokens, learned, long, refused, left_out, shown)


def _refused(view: str, rows: _Counted) -> str:
    if view == TEXTS:
        return "every row must have a text" if rows.wrong else ""
    if view == CHATS and rows.mixed:
        return f"row {rows.mixed} is of another format (--data.format leaves such rows out)"
    if rows.wrong and rows.wrong >= TOLERATED * rows.total:
        return f"{rows.wrong:,} of {rows.total:,} rows can't be used, 1 % or more"
    long = rows.total - rows.used - rows.wrong
    if not rows.used or (view == PAIRS and long > MOST_LONG * rows.total):
        return f"{long:,} of {rows.total:,} rows are too long for the context length"
    return ""


def _view(made: Format | None) -> str | None:
    if made is None:
        return None
    return PAIRS if made.preference is not None else CHATS


def _recognised(row: Row, text_key: str) -> tuple[Format | None, str | None]:
    made = recognise_any(row)
    if made is None and isinstance(row.get(text_key), str):
        return None, TEXTS
    return made, _view(made)


def _encoded(row: Row, made: Format | None, view: str, ask: Ask) -> _Row:
    if made is None:
        ids = ask.tokenizer.array(utf8(text_of(row.get(ask.text_key), repr(ask.text_key)))).astype(np.int32)
        return _Row((("", (ids, np.ones(len(ids), dtype=bool))),))
    if not made.recognises(row):
        other = recognise(row)
        what = f"of format {other.name}" if other is not None else f"of no known format (keys: {key_names(row)})"
        kind = Unusable if other is None else _OtherFormat
        raise kind(f"a row {what} in a file of {made.name}")
    if view == PAIRS:
        assert made.preference is not None
        better, worse = pair_ids(made.preference(row), ask.tokenizer)
        if len(better[0]) + len(worse[0]) > ask.context:
            raise _TooLong(f"both answers have more tokens than the context length {ask.context}")
        return _Row((("chosen", better), ("rejected", worse)))
    assert made.conversation is not None
    ids, mask = conversation_ids(checked(made.conversation(row)), ask.tokenizer)
    longest = ask.context + 1
    if not mask[:longest].any():
        raise _TooLong(f"no words of the assistant within the context length {ask.context}")
    return _Row((("", (ids[:longest], mask[:longest])),), len(ids) > longest)


def _sample(row: int, what: str, ids: Any, mask: Any, tokenizer: Tokenizer) -> Sample:
    shown, edges = len(ids[:SAMPLE_TOKENS]), np.flatnonzero(np.diff(mask[:SAMPLE_TOKENS])) + 1
    places = [0, *edges.tolist(), shown]
    pieces = tuple(
        (tokenizer.decode(ids[begin:end].tolist()), bool(mask[begin]))
        for begin, end in itertools.pairwise(places)
        if begin < end
    )
    return Sample(row, what, pieces, len(ids) > SAMPLE_TOKENS)


def _text_file(path: str, ask: Ask) -> Shown:
    """One document. Its rows are its lines."""
    if ask.format not in (AUTO, TEXT):
        raise Refusal(f"{path} is plain text, not rows of {ask.format}", EX_DATAERR)
    tokens = lines = 0
    first: Sample | None = None
    for data in _stretches(path):
        lines += data.count(b"\n")
        for segment in ask.tokenizer.segments(data):
            ids = ask.tokenizer.array(segment).astype(np.int32)
            tokens += len(ids)
            if first is None:
                first = _sample(1, "", ids, np.ones(len(ids), dtype=bool), ask.tokenizer)
    return Shown(path, TEXT, "one document", TEXTS, lines, lines, tokens, tokens, 0, "", (), (first,) if first else ())


def _stretches(path: str) -> Iterator[bytes]:
    """Whole lines, about a megabyte at once. Refused as training refuses it: what is binary, or not UTF-8."""
    if not packing_of(path):
        check_head(path, text=True)
    with open_unpacked(path) as stream:
        pieces: list[bytes] = []  # of a line whose end is not read yet
        place = 0
        while more := stream.read(_STRETCH):
            end = more.rfind(b"\n") + 1
            if not end:
                pieces.append(more)
                continue
            data = b"".join([*pieces, more[:end]])
            pieces = [more[end:]]
            refuse_binary(path, data, place)
            as_text(path, data, place)
            place += len(data)
            yield data
        rest = b"".join(pieces)
        as_text(path, rest, place)
        yield rest
