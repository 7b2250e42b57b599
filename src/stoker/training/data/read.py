"""The documents of a span: bytes of text that are UTF-8, or conversations. Whatever is wrong is refused with its file
and place.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from typing import Any, BinaryIO

from stoker.contract.names import EX_DATAERR, Refusal
from stoker.contract.settings import suggest
from stoker.contract.untrusted import open_regular, parse_json, printable
from stoker.training.data.looks import as_text, refuse_binary
from stoker.training.data.parquet import open_parquet, read_rows
from stoker.training.data.units import Span
from stoker.training.tokenizer.chat import LEARNED, MORE, ROLES, Conversation, Turn

LONGEST_LINE = 64 << 20
LONG_LINE = (
    1 << 20
)  # from here on its parts are counted before it is parsed: 64 MB of [[],[],[] … would become gigabytes
REPLACEMENT = "\ufffd"
MESSAGES, TOOLS = "messages", "tools"
NAMED = 3  # rows that a message names
HOPELESS = 1000  # rows without a single conversation: this is another kind of file
Message = tuple[str, bytes]


def texts(span: Span, text_key: str) -> Iterator[tuple[bytes, bool]]:
    """(text, whether its document ends with it)."""
    if span.form == "text":
        yield _stretch(span), span.ends
        return
    for row, place in rows(span, text_key):
        yield _text(row, text_key, place), True


def conversations(span: Span, wrong: list[str]) -> Iterator[tuple[list[Message], str]]:
    """`wrong`: gets a line for each row that is no conversation with an answer in it; how many there may be is for the
    caller to say.
    """
    if span.form == "text":
        raise Refusal(
            f"{span.path} is plain text; data.kind=chat takes jsonl or parquet rows with {MESSAGES}", EX_DATAERR
        )
    found = 0
    for row, place in rows(span, MESSAGES):
        try:
            messages = _messages(row)
        except _NotAChat as problem:  # a line is numbered by reading all before it: not for thousands of them
            wrong.append(printable(f"{at(place)}{problem}", 1000) if len(wrong) < NAMED else "")
            if len(wrong) == HOPELESS and not found:
                raise Refusal(wrong[0], EX_DATAERR) from problem
            continue
        found += 1
        yield messages, place


def _stretch(span: Span) -> bytes:
    with os.fdopen(open_regular(span.path), "rb") as file:
        file.seek(span.begin)
        data = file.read(span.end - span.begin)
    refuse_binary(span.path, data, span.begin)
    as_text(span.path, data, span.begin)
    return data


def rows(span: Span, column: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Rows, and where each stands, for people."""
    return _parquet(span, column) if span.form == "parquet" else _lines(span)


def _lines(span: Span) -> Iterator[tuple[dict[str, Any], str]]:
    with os.fdopen(open_regular(span.path), "rb") as file:
        file.seek(max(span.begin - 1, 0))
        if span.begin:
            _line(file, span.path)  # the end of a line that began before, or of one that ends just there
        place = file.tell()
        while place < span.end:
            line = _line(file, span.path)
            if not line:
                return
            if place == 0:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.isspace():
                yield _row(line, span.path, place), f"{span.path}\0{place}"
            place = file.tell()


def _line(file: BinaryIO, path: str) -> bytes:
    place = file.tell()
    line = file.readline(LONGEST_LINE + 1)
    if len(line) > LONGEST_LINE:
        raise Refusal(
            f"{at(f'{path}' + chr(0) + str(place))}: the line is longer than {LONGEST_LINE >> 20} MB: is this a row per"
            " line?",
            EX_DATAERR,
        )
    return line


def _row(line: bytes, path: str, place: int) -> dict[str, Any]:
    where = f"{path}\0{place}"
    try:
        found = json.loads(line) if len(line) < LONG_LINE else parse_json(line)
    except UnicodeDecodeError as problem:
        as_text(path, line, place)
        raise Refusal(f"{at(where)} is not UTF-8: {problem}", EX_DATAERR) from problem
    except (ValueError, RecursionError) as problem:
        why = f"{problem.msg}, column {problem.colno}" if isinstance(problem, json.JSONDecodeError) else problem
        raise Refusal(
            f"{at(where)} is not JSON: {why}; it begins {line[:40].decode('utf-8', 'replace')!r}", EX_DATAERR
        ) from problem
    if not isinstance(found, dict):
        raise Refusal(f"{at(where)} is a JSON {type(found).__name__}, not an object with keys", EX_DATAERR)
    return found


def _parquet(span: Span, column: str) -> Iterator[tuple[dict[str, Any], str]]:
    table = open_parquet(span.path)
    names = list(table.schema_arrow.names)
    if column not in names:
        raise Refusal(
            f"{span.path} has no column {column!r}{_did_you_mean(column, names)}; its columns: {', '.join(names)}",
            EX_DATAERR,
        )
    before = sum(table.metadata.row_group(group).num_rows for group in range(span.group))
    place = 0
    columns = (column, TOOLS) if column == MESSAGES and TOOLS in names else (column,)
    for some in read_rows(span.path, table, span.group, columns):
        if place + len(some) > span.begin:
            for offset, row in enumerate(some):
                if span.begin <= place + offset < span.end:
                    yield row, f"{span.path}, row {before + place + offset + 1}"
        place += len(some)
        if place >= span.end:
            return


def _text(row: dict[str, Any], key: str, place: str) -> bytes:
    if key not in row:
        hint = "; rows with messages are chats: data.kind=chat" if MESSAGES in row else _did_you_mean(key, row)
        raise Refusal(
            f"{at(place)} has no {key!r}; its keys: {_names(row)}{hint} (data.text_key)",
            EX_DATAERR,
        )
    value = row[key]
    if not isinstance(value, str):
        raise Refusal(
            f"{at(place)}: {key!r} is {'null' if value is None else type(value).__name__}, not text", EX_DATAERR
        )
    return utf8(value)


def utf8(text: str) -> bytes:
    """JSON can spell half a surrogate pair, which is no character: U+FFFD stands for it, as everywhere."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


class _NotAChat(ValueError):
    """What is wrong with a row, to stand behind its place."""


def _messages(row: dict[str, Any]) -> list[Message]:
    if MESSAGES not in row:
        raise _NotAChat(f" has no {MESSAGES!r}; its keys: {_names(row)}{_did_you_mean(MESSAGES, row)}")
    told = row[MESSAGES]
    if not isinstance(told, list) or not told:
        raise _NotAChat(
            f": {MESSAGES!r} is {'empty' if told == [] else type(told).__name__}, not a list of role and content"
        )
    found = Conversation()
    found.tools = _tools(row.get(TOOLS))
    for number, one in enumerate(told, 1):
        role, content = (one.get("role"), one.get("content")) if isinstance(one, dict) else (None, None)
        if role not in ROLES:
            raise _NotAChat(f": message {number} has the role {role!r}, not one of {', '.join(ROLES)}")
        more = {key: one[key] for key in MORE if one.get(key) is not None}
        if content is None and more.get("tool_calls"):
            content = ""  # a call without a word
        if not isinstance(content, str):
            raise _NotAChat(f": message {number} has no text as content but {type(content).__name__}")
        found.append(Turn(role, utf8(content), more) if more else (role, utf8(content)))
    if not any(role == LEARNED for role, _ in found):
        raise _NotAChat(f": no message is the {LEARNED}'s")
    return found


def _tools(told: Any) -> list[Any]:
    """A list, or JSON of one: parquet has no column for whatever a tool's parameters are."""
    if told is None or told == "":
        return []
    try:
        tools = parse_json(told.encode()) if isinstance(told, str) else told
    except ValueError as problem:
        raise _NotAChat(f": 'tools' is no JSON: {problem}") from problem
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise _NotAChat(": 'tools' is not a list of objects")
    return tools


def _names(row: dict[str, Any]) -> str:
    shown = ", ".join(str(name)[:80] for name in itertools.islice(row, 20))
    return f"{shown} and {len(row) - 20} more" if len(row) > 20 else shown or "none"


def _did_you_mean(key: str, names: Any) -> str:
    return suggest(key, [str(name)[:80] for name in itertools.islice(names, 100)])


def at(place: str) -> str:
    """A line's number is counted only when somebody must be told."""
    path, _, offset = place.partition("\0")
    if not offset:
        return place
    number, left = 1, int(offset)
    with open(path, "rb") as file:
        while left:
            data = file.read(min(left, 1 << 24))
            if not data:
                break
            number += data.count(b"\n")
            left -= len(data)
    return f"{path}, line {number}"
