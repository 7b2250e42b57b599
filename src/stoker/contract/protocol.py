"""The agent protocol: JSON lines over a byte stream, each optionally followed by a raw payload.

The first line is a sentinel with the protocol's version: a login shell may print a greeting before it, which is
skipped. A message with "size" is followed by that many raw bytes (a rank's output): base64 would cost a third more on
the wire, and at 50 MB/s a core.

Hosts are trusted. Types are checked here, once, so that a bug or another version ends in one line and not in a traceback.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from stoker.contract import typed_values
from stoker.contract.text import parse_json

VERSION = 1
SENTINEL = b"STOKER-AGENT %d\n" % VERSION
_SENTINEL_WORD = b"STOKER-AGENT "
PING_S = 1.0
SILENCE_S = 8.0
GREETING_LIMIT = 1 << 16  # a login that starts a menu or an editor prints without end, and no agent follows

Message = dict[str, Any]


class ProtocolError(Exception):
    pass


def encode_message(message: Message, payload: bytes = b"") -> bytes:
    if payload:
        message = {**message, "size": len(payload)}
    return json.dumps(message, separators=(",", ":")).encode() + b"\n" + payload


class Decoder:
    """Turns bytes into messages. Raises ProtocolError. `expect_sentinel` on the side that reads an agent."""

    def __init__(self, expect_sentinel: bool = False) -> None:
        self._buffer = bytearray()
        self._searched = 0  # bytes of the buffer that hold no end of line
        self._await_sentinel = expect_sentinel
        self._header: Message | None = None
        self.greeting = b""

    @property
    def greeted(self) -> bool:
        """The agent itself has spoken, not only the login before it."""
        return not self._await_sentinel

    def feed(self, data: bytes) -> Iterator[tuple[Message, bytes]]:
        self._buffer += data
        if self._await_sentinel and not self._past_greeting():
            return
        while True:
            if self._header is None:
                line = self._line()
                if line is None:
                    return
                header = _read_header(line)
                if not header.get("size"):
                    yield header, b""
                    continue
                self._header = header
            size = self._header["size"]
            if len(self._buffer) < size:
                return
            payload = bytes(self._buffer[:size])
            del self._buffer[:size]
            header, self._header = self._header, None
            yield header, payload

    def _line(self) -> bytes | None:
        end = self._buffer.find(b"\n", self._searched)
        if end < 0:
            self._searched = len(self._buffer)
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._searched = 0
        return line

    def _past_greeting(self) -> bool:
        at = self._buffer.find(_SENTINEL_WORD)
        end = self._buffer.find(b"\n", at) if at >= 0 else -1
        if end < 0:
            if len(self._buffer) > GREETING_LIMIT:
                raise ProtocolError(f"no agent answered, only: {bytes(self._buffer[:200])!r}")
            self.greeting = bytes(self._buffer[-2000:])
            return False
        sentinel = bytes(self._buffer[at : end + 1])
        if sentinel != SENTINEL:
            line = f"the agent speaks {sentinel[:80]!r}, this Stoker {SENTINEL!r}: use one version on all hosts"
            raise ProtocolError(line)
        del self._buffer[: end + 1]
        self._await_sentinel = False
        return True


def _read_header(line: bytes) -> Message:
    try:
        header = parse_json(line)
    except ValueError as problem:
        raise ProtocolError(f"not a message: {line[:80]!r}") from problem
    if not isinstance(header, dict):
        raise ProtocolError(f"not a message: {line[:80]!r}")
    size = header.get("size", 0)
    if type(size) is not int or size < 0:
        raise ProtocolError(f"a payload of {ascii(size)[:40]} bytes")
    return header


def read_payload(kind: str, payload: bytes, what: str) -> Any:
    """Return the JSON value of a payload, which has the type `kind` (contract/typed_values.py). `what` names it in errors."""
    try:
        return typed_values.read_value(kind, parse_json(payload))
    except ValueError as problem:
        raise ProtocolError(f"{what} can't be read: {problem}") from None


# ---- what an agent may say ----

# The fields of every kind of message, and their types; one with ? may be missing.
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
    "gauges": {"host": "dict[str, Real | None]", "gpus": "dict[str, dict[str, Real | None | tuple[str, ...]]]", "ranks": "dict[str, int]"},
    "beatless": _RANK,
    "groups": {**_RANK, "groups": "str"},
    "mark": {**_RANK, "name": "str"},
    "listening": {**_RANK, "port": "int"},
    "phase": {**_RANK, "name": "str"},
    "note": {**_RANK, "text": "str"},
    "out": {**_RANK, "fd": "int"},
    "ram": {**_RANK, "bytes": "int", "limit": "int", "loader_workers?": "int"},
    "inspection": {"ask": "int"},
    "error": {**_RANK, "error": "Any"},
    "exit": {**_RANK, "code": "int", "time": "float", "ours": "bool", "error": "Any", "elastic": "Any", "stack": "str", "steps": "int", "core": "bool",
             "calls": "list[Any]", "script_end": "Any", "oom_killed": "bool", "around": "Any"},
    # of the end
    "stopping": {},
    "helpers": {"names": "list[str]", "seconds": "float"},
    "finished": {"stopped": "list[str]", "gpus_held": "list[str]", "stuck": "list[dict[str, int | str]]"},
}  # fmt: skip


def check_message(message: Message) -> Message:
    """Return the message with the fields of its kind. Raises ProtocolError if one is missing or has another type."""
    kind = message.get("is")
    fields = KINDS.get(kind) if isinstance(kind, str) else None
    if fields is None:
        raise ProtocolError(f"it sent an unknown message {ascii(kind)[:60]}")
    try:
        return {"is": kind, **typed_values.read_fields(fields, message)}
    except ValueError as problem:
        raise ProtocolError(f"its message {kind!r} is wrong: {problem}") from None
