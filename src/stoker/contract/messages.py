"""What an agent may say: the fields of every kind of message, and their types. Checked where it arrives: a host may be
broken, or hostile.

A field with ? may be missing. A message of a kind that is not here is none of ours.
"""

from __future__ import annotations

from stoker.contract import typed
from stoker.contract.protocol import Message, ProtocolError

_RANK = {"rank": "int"}
KINDS: dict[str, dict[str, str]] = {
    # before the start
    "ping": {},
    "host": {"machine": "dict[str, Any]", "held": "dict[str, str]", "selves?": "list[list[int]]", "found?": "list[str]", "visible?": "str | None"},
    "refused": {"line": "str", "code": "int"},
    "locked": {"refused": "dict[str, str]", "notices": "list[str]"},
    "port": {"port": "int", "wanted?": "int", "holder?": "str"},
    "probe": {"ask": "str", "what": "str", "more?": "bool"},
    "suspended": {},
    # of ranks
    "up": {**_RANK, "pid": "int", "time": "float"},
    "unstarted": {**_RANK, "text": "str"},
    "lock": {**_RANK, "what": "str", "holders?": "list[int]", "seconds?": "float", "why?": "str | None", "slots?": "int | None"},
    "mem": {**_RANK, "at": "str", "note": "str", "rss": "int | None", "host_used": "int", "host_total": "int", "gpu": "tuple[int, int] | None"},
    "first-step": {**_RANK, "time": "float"},
    "beats": {"ranks": "dict[str, tuple[int, int, int, float, list[tuple[int, str]]]]"},
    "vitals": {"ranks": "dict[str, tuple[str, float, int]]"},
    "beatless": _RANK,
    "groups": {**_RANK, "groups": "str"},
    "mark": {**_RANK, "name": "str"},
    "phase": {**_RANK, "name": "str"},
    "note": {**_RANK, "text": "str"},
    "out": {**_RANK, "fd": "int"},
    "ram": {**_RANK, "bytes": "int", "limit": "int"},
    "inspection": {"ask": "int"},
    "error": {**_RANK, "error": "Any"},
    "exit": {**_RANK, "code": "int", "time": "float", "ours": "bool", "error": "Any", "elastic": "Any", "stack": "str", "steps": "int", "core": "bool",
             "oom_killed": "bool", "around": "Any"},
    # of the end
    "stopping": {},
    "helpers": {"names": "list[str]", "seconds": "float"},
    "finished": {"stopped": "list[str]", "gpus_held": "list[str]", "stuck": "list[dict[str, int | str]]"},
}  # fmt: skip


def read(message: Message) -> Message:
    """The message with the fields it must have, and no others."""
    kind = message.get("is")
    fields = KINDS.get(kind) if isinstance(kind, str) else None
    if fields is None:
        raise ProtocolError(f"it says {ascii(kind)[:60]}, which means nothing here")
    try:
        return {"is": kind, **typed.read_fields(fields, message)}
    except ValueError as problem:
        raise ProtocolError(f"its message {kind!r} is wrong: {problem}") from None
