"""The documents of a span: bytes of text that are UTF-8, or conversations. Whatever is wrong is refused with its file
and place.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from stoker.contract.errors import EX_DATAERR, Refusal, parsing, unreadable
from stoker.contract.frozen import as_json, frozen
from stoker.contract.options import suggest
from stoker.contract.safe_io import open_regular
from stoker.contract.text import escape
from stoker.training.data.formats.format import Format, Turn, Unusable, checked, in_bytes, refuse_mixed
from stoker.training.data.formats.table import FORMATS, known, recognise
from stoker.training.data.jsonl import parse_row, utf8
from stoker.training.data.looks import as_text, refuse_binary
from stoker.training.data.parquet import open_parquet, read_rows
from stoker.training.data.rows import counted_in
from stoker.training.data.units import Span

REPLACEMENT = "\ufffd"
MESSAGES = "messages"
NAMED = 3  # rows that a message names
HOPELESS = 1000  # rows without a single conversation: this is another kind of file
HOPELESS_AFTER_ALL = 100_000  # rows of which not one in a hundred is a conversation
Message = tuple[str, bytes]


@frozen
class Place:
    """Where a row stands. Its number is counted only when somebody must be told."""

    name: str  # the file that people know
    path: str
    offset: int = 0  # in `path`, of a row that is a line
    row: int = 0  # of one that is not


Remark = tuple[dict[str, Any], str]  # a place, and the remark about it: a line of JSON takes it to another process


def remark(place: Place, text: str) -> Remark:
    return as_json(place), escape(text, 1000)


class Remarks:
    """How many rows have one, and the first few: a file of nothing but nulls has millions."""

    def __init__(self) -> None:
        self.count = 0
        self.first: list[Remark] = []

    def add(self, place: Place, text: str) -> None:
        self.count += 1
        if len(self.first) < NAMED:
            self.first.append(remark(place, text))


def is_hopeless(lost: int, found: int) -> bool:
    """Whether a file with so many unusable and usable rows so far is of another kind: the rest need not be read."""
    return (lost >= HOPELESS and not found) or (lost >= HOPELESS_AFTER_ALL and lost > 99 * found)


def named(found: Remark) -> str:
    """With the row's number, which is counted here: only for those that are printed."""
    place, text = found
    return f"{at(Place(**place))}{text}"


def texts(span: Span, text_key: str) -> Iterator[tuple[bytes, bool]]:
    """(text, whether its document ends with it)."""
    if span.form == "text":
        yield _stretch(span), span.ends
        return
    for row, place in rows(span, (text_key,)):
        yield _text(row, text_key, place), True


def conversations(span: Span, wrong: Remarks) -> Iterator[tuple[list[Message], Place]]:
    """`wrong`: gets a remark for each row that is no conversation with an answer; the caller judges how many."""
    if span.form == "text":
        raise Refusal(f"{span.shown} is plain text; chats need rows: {known()} (`stoker docs data`)", EX_DATAERR)
    chosen = FORMATS[span.format or MESSAGES]
    found = lost = 0
    for row, place in rows(span, chosen.columns):
        try:
            messages = in_bytes(turns_in(row, chosen, None if span.mixed else partial(at, place)))
        except Unusable as problem:
            wrong.add(place, f": {problem}")
            lost += 1
            if is_hopeless(lost, found):
                raise Refusal(named(wrong.first[0]), EX_DATAERR) from problem
            continue
        except (Refusal, MemoryError, OSError):
            raise
        except Exception as problem:  # of a row that no format foresees
            raise unreadable(at(place), problem) from problem
        found += 1
        yield messages, place


def turns_in(row: Mapping[str, Any], chosen: Format, where: Callable[[], str] | None) -> list[Turn]:
    """A row of a file of `chosen` rows. Raises Unusable. `where`: names the row, to refuse one of another format; None:
    that one is unusable.
    """
    assert chosen.conversation is not None
    if not chosen.recognises(row):
        other = recognise(row)
        if other is not None and where is not None:
            raise refuse_mixed(where(), other, chosen)
        raise Unusable(f"no {chosen.about}; its keys: {key_names(row)}{_did_you_mean(chosen.columns[0], row)}")
    return checked(chosen.conversation(row))


def _stretch(span: Span) -> bytes:
    with os.fdopen(open_regular(span.path), "rb") as file:
        file.seek(span.begin)
        data = file.read(span.end - span.begin)
    refuse_binary(span.shown, data, span.begin)
    as_text(span.shown, data, span.begin)
    return data


def rows(span: Span, columns: tuple[str, ...]) -> Iterator[tuple[dict[str, Any], Place]]:
    """`columns`: those that are read where a file keeps them apart."""
    with parsing(span.shown):
        yield from _parquet(span, columns) if span.form == "parquet" else _lines(span)


def _lines(span: Span) -> Iterator[tuple[dict[str, Any], Place]]:
    with os.fdopen(open_regular(span.path), "rb") as file:
        file.seek(max(span.begin - 1, 0))
        if span.begin:
            file.readline()  # the end of a line that began before, or of one that ends just there
        offset = file.tell()
        while offset < span.end and (line := file.readline()):
            if offset == 0:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.isspace():
                place = Place(span.shown, span.path, offset)
                yield _row(line, place), place
            offset = file.tell()


def _row(line: bytes, place: Place) -> dict[str, Any]:
    try:
        return parse_row(line)
    except UnicodeDecodeError as problem:
        as_text(place.name, line, place.offset)
        raise Refusal(f"{at(place)} is not UTF-8: {problem}", EX_DATAERR) from problem
    except ValueError as problem:
        raise Refusal(f"{at(place)} {problem}", EX_DATAERR) from problem


def _parquet(span: Span, columns: tuple[str, ...]) -> Iterator[tuple[dict[str, Any], Place]]:
    table = open_parquet(span.path, span.name)
    names = list(table.schema_arrow.names)
    there = [column for column in columns if column in names]
    if not there:
        raise Refusal(
            f"{span.shown} has no column {columns[0]!r}{_did_you_mean(columns[0], names)}; its columns:"
            f" {', '.join(names)}",
            EX_DATAERR,
        )
    before = sum(table.metadata.row_group(group).num_rows for group in range(span.group))
    done = 0
    for some in read_rows(table, span.group, there, span.shown):
        if done + len(some) > span.begin:
            for offset, row in enumerate(some):
                if span.begin <= done + offset < span.end:
                    yield row, Place(span.shown, span.path, row=before + done + offset + 1)
        done += len(some)
        if done >= span.end:
            return


def _text(row: dict[str, Any], key: str, place: Place) -> bytes:
    if key not in row:
        chat = recognise(row)
        hint = f"; rows with {chat.about} are chats: data.kind=chat" if chat is not None else _did_you_mean(key, row)
        raise Refusal(
            f"{at(place)} has no {key!r}; its keys: {key_names(row)}{hint} (data.text_key)",
            EX_DATAERR,
        )
    value = row[key]
    if not isinstance(value, str):
        raise Refusal(
            f"{at(place)}: {key!r} is {'null' if value is None else type(value).__name__}, not text", EX_DATAERR
        )
    return utf8(value)


def key_names(row: Mapping[str, Any]) -> str:
    shown = ", ".join(str(name)[:80] for name in itertools.islice(row, 20))
    return f"{shown} and {len(row) - 20} more" if len(row) > 20 else shown or "none"


def _did_you_mean(key: str, names: Any) -> str:
    return suggest(key, [str(name)[:80] for name in itertools.islice(names, 100)])


def at(place: Place) -> str:
    if place.row:
        return f"{place.name}, row {place.row}"
    number, left = 1, place.offset
    with open(place.path, "rb") as file:
        while left:
            data = file.read(min(left, 1 << 24))
            if not data:
                break
            number += data.count(b"\n")
            left -= len(data)
    return f"{place.name}, {counted_in(place.name)} {number}"
