"""What a format of rows is: how a row is recognised, and what can be made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from stoker.contract.errors import EX_DATAERR, Refusal
from stoker.contract.frozen import frozen
from stoker.contract.text import escape, parse_json
from stoker.training.data.jsonl import utf8
from stoker.training.tokenizer import roles as speakers
from stoker.training.tokenizer.roles import LEARNED, MORE, ROLES

Row = Mapping[str, Any]
Turn = tuple[str, str]  # role and text; one with more is a roles.Turn
_SAME_ROLE = {role: role for role in ROLES} | {"developer": "system", "function": "tool"}


class Unusable(Exception):
    """One row that can't be used, and why."""


@frozen
class Preference:
    """Two answers to one prompt. Each answer ends with the assistant's turn."""

    prompt: tuple[Turn, ...]
    chosen: tuple[Turn, ...]
    rejected: tuple[Turn, ...]
    kind: str = "all"


@frozen
class Format:
    """`conversation` and `preference`: the views that training reads, None where there is none. Both raise Unusable."""

    name: str  # data.format
    about: str  # its columns, for people
    columns: tuple[str, ...]  # all that it reads, of a parquet or arrow file
    recognises: Callable[[Row], bool]
    conversation: Callable[[Row], list[Turn]] | None = None
    preference: Callable[[Row], Preference] | None = None


def text_of(value: Any, what: str) -> str:
    if not isinstance(value, str):
        kind = "missing" if value is None else f"a {type(value).__name__}"
        raise Unusable(f"{what} is {kind}, not text")
    return value


def turns_of(
    value: Any, what: str, role: str = "role", content: str = "content", roles: Row = _SAME_ROLE
) -> list[Turn]:
    """A list of messages, or its JSON as a csv file holds it. Roles that only one publisher uses become ours."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = parse_json(value)
        except ValueError as problem:
            raise Unusable(f"{what} is text that is not JSON: {problem}") from problem
    if not isinstance(value, (list, tuple)):
        raise Unusable(f"{what} is {'missing' if value is None else type(value).__name__}, not a list of messages")
    turns: list[Turn] = []
    for number, message in enumerate(value, 1):
        name, said = (message.get(role), message.get(content)) if isinstance(message, Mapping) else (None, None)
        if not isinstance(name, str) or name not in roles:
            raise Unusable(f"message {number} has the role {name!r}, not one of {', '.join(roles)}"[:300])
        more = {key: message[key] for key in MORE if message.get(key) is not None} if role == "role" else {}
        text = "" if said is None and more.get("tool_calls") else _content(said, number)  # a call without a word
        turns.append(speakers.Turn(str(roles[name]), text, more) if more else (str(roles[name]), text))
    return turns


def tools_of(value: Any) -> list[Any]:
    """A list, or JSON of one: parquet has no column for whatever a tool's parameters are."""
    if value is None or value == "":
        return []
    try:
        tools = parse_json(value.encode()) if isinstance(value, str) else value
    except ValueError as problem:
        raise Unusable(f"'tools' is not JSON: {problem}") from problem
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Unusable("'tools' is not a list of objects")
    return tools


def in_bytes(turns: Iterable[Turn]) -> speakers.Conversation[bytes]:
    """As a tokenizer takes them."""
    made = speakers.Conversation[bytes]()
    made.tools = getattr(turns, "tools", ())
    for turn in turns:
        role, text = turn
        more = getattr(turn, "more", None)
        made.append(speakers.Turn(role, utf8(text), more) if more else (role, utf8(text)))
    return made


def _content(value: Any, number: int) -> str:
    """A text, or the parts that newer APIs write: [{"type": "text", "text": …}]."""
    if isinstance(value, str):
        return value
    if not isinstance(value, (list, tuple)):
        raise Unusable(f"message {number} has no text as content but {type(value).__name__}")
    parts = []
    for part in value:
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise Unusable(f"message {number} has a part of type {kind!s}; only text is learned"[:200])
        parts.append(part["text"])
    return "".join(parts)


def checked(turns: list[Turn]) -> list[Turn]:
    """A conversation that something can be learned from."""
    if not turns:
        raise Unusable("an empty conversation")
    if not any(role == LEARNED for role, _ in turns):
        raise Unusable(f"no message is the {LEARNED}'s")
    return turns


def refuse_mixed(where: str, row: Format, file: Format) -> Refusal:
    """`where`: the file and the row."""
    return Refusal(
        escape(
            f"{where}: the row is of format {row.name} ({row.about}) and the rows before it are {file.name}"
            f" ({file.about}): put each format in a file of its own, or set data.format {file.name} to leave such rows out"
        ),
        EX_DATAERR,
    )
