"""The agent protocol: JSON lines over a byte stream, each optionally followed by a raw payload.

The first line is a sentinel with the protocol's version; whatever a login shell prints before it is skipped. A
message with "size" is followed by that many raw bytes (a rank's output): base64 would cost a third more on the wire,
and a core at 50 MB/s.

Hosts are trusted. Types are checked here, once, so that a bug or another version ends in one line, not in a
traceback.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from stoker.contract import typed_values
from stoker.contract.text import parse_json

VERSION = 1
SENTINEL = b"STOKER-AGENT %d\n" % VERSION
_SENTINEL_PREFIX = b"STOKER-AGENT "
PING_S = 1.0
SILENCE_S = 8.0
GREETING_LIMIT = 1 << 16  # bytes; a login that starts a menu or an editor prints forever, and no agent follows

Message = dict[str, Any]


class ProtocolError(Exception):
    """The other side sent something that is not a message of this protocol."""


def encode_message(message: Message, payload: bytes = b"") -> bytes:
    if payload:
        message = {**message, "size": len(payload)}
    return json.dumps(message, separators=(",", ":")).encode() + b"\n" + payload


class Decoder:
    """Turns bytes into messages. With `expect_sentinel` (in the launcher), skips a greeting before the sentinel."""

    def __init__(self, expect_sentinel: bool = False) -> None:
        self._buffer = bytearray()
        self._searched = 0  # this many bytes of the buffer hold no end of line
        self._await_sentinel = expect_sentinel
        self._header: Message | None = None
        self.greeting = b""

    @property
    def greeted(self) -> bool:
        """Return whether the agent itself has answered. A login before it doesn't count."""
        return not self._await_sentinel

    def feed(self, data: bytes) -> Iterator[tuple[Message, bytes]]:
        """Yield the complete messages with their payloads. Raises ProtocolError."""
        self._buffer += data
        if self._await_sentinel and not self._skip_greeting():
            return
        while True:
            if self._header is None:
                line = self._take_line()
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

    def _take_line(self) -> bytes | None:
        end = self._buffer.find(b"\n", self._searched)
        if end < 0:
            self._searched = len(self._buffer)
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._searched = 0
        return line

    def _skip_greeting(self) -> bool:
        """Remove everything up to the sentinel. Returns False if the sentinel is not there yet."""
        start = self._buffer.find(_SENTINEL_PREFIX)
        end = self._buffer.find(b"\n", start) if start >= 0 else -1
        if end < 0:
            if len(self._buffer) > GREETING_LIMIT:
                raise ProtocolError(f"no agent answered; the login printed {bytes(self._buffer[:200])!r}")
            self.greeting = bytes(self._buffer[-2000:])
            return False
        sentinel = bytes(self._buffer[start : end + 1])
        if sentinel != SENTINEL:
            versions = f"the agent sent {sentinel[:80]!r}, and this Stoker expects {SENTINEL!r}"
            raise ProtocolError(f"{versions}; use one version of Stoker on all hosts")
        del self._buffer[: end + 1]
        self._await_sentinel = False
        return True


def _read_header(line: bytes) -> Message:
    try:
        header = parse_json(line)
    except ValueError as problem:
        raise ProtocolError(f"it sent a line that is not a message: {line[:80]!r}") from problem
    if not isinstance(header, dict):
        raise ProtocolError(f"it sent a line that is not a message: {line[:80]!r}")
    size = header.get("size", 0)
    if type(size) is not int or size < 0:
        raise ProtocolError(f"it sent a message with an invalid payload size: {ascii(size)[:40]}")
    return header


def read_payload(kind: str, payload: bytes, what: str) -> Any:
    """Return the JSON value of a payload of the type `kind` (contract/typed_values.py). `what` names it in errors."""
    try:
        return typed_values.read_value(kind, parse_json(payload))
    except ValueError as problem:
        raise ProtocolError(f"{what} can't be read: {problem}") from None


# ---- messages of an agent ----

# The fields of each kind of message with their types. A field with ? may be missing.
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
    # about ranks
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
    # at the end
    "stopping": {},
    "helpers": {"names": "list[str]", "seconds": "float"},
    "finished": {"stopped": "list[str]", "gpus_held": "list[str]", "stuck": "list[dict[str, int | str]]"},
}  # fmt: skip


def check_message(message: Message) -> Message:
    """Return the message with the fields of its kind. Raises ProtocolError for a missing field or a wrong type."""
    kind = message.get("is")
    fields = KINDS.get(kind) if isinstance(kind, str) else None
    if fields is None:
        raise ProtocolError(f"it sent an unknown message {ascii(kind)[:60]}")
    try:
        return {"is": kind, **typed_values.read_fields(fields, message)}
    except ValueError as problem:
        raise ProtocolError(f"its message {kind!r} is wrong: {problem}") from None
