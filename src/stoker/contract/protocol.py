"""The agent protocol: JSON lines over a byte stream, each optionally followed by a raw payload.

The first line is a sentinel with the protocol's version: a login shell may print a greeting before it, which is skipped.
A message with "size" is followed by that many raw bytes (a rank's output): base64 would cost a third more on the wire,
and at 50 MB/s a core.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

VERSION = 1
SENTINEL = b"STOKER-AGENT %d\n" % VERSION
_SENTINEL_WORD = b"STOKER-AGENT "
PING_S = 1.0
SILENCE_S = 8.0
GREETING_LIMIT = 1 << 16

Message = dict[str, Any]


class ProtocolError(Exception):
    pass


def encode(message: Message, payload: bytes = b"") -> bytes:
    if payload:
        message = {**message, "size": len(payload)}
    return json.dumps(message, separators=(",", ":")).encode() + b"\n" + payload


class Decoder:
    """Bytes in, messages out. `expect_sentinel` on the side that reads an agent."""

    def __init__(self, expect_sentinel: bool = False) -> None:
        self._buffer = bytearray()
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
                end = self._buffer.find(b"\n")
                if end < 0:
                    return
                line = bytes(self._buffer[:end])
                del self._buffer[: end + 1]
                try:
                    header = json.loads(line.decode())  # given bytes, it looks for their encoding first
                except ValueError as problem:
                    raise ProtocolError(f"not a message: {line[:80]!r}") from problem
                if not isinstance(header, dict):
                    raise ProtocolError(f"not a message: {line[:80]!r}")
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

    def _past_greeting(self) -> bool:
        at = self._buffer.find(_SENTINEL_WORD)
        end = self._buffer.find(b"\n", at) if at >= 0 else -1
        if end < 0:
            if len(self._buffer) > GREETING_LIMIT:
                raise ProtocolError(f"no agent answered, only: {bytes(self._buffer[:200])!r}")
            self.greeting = bytes(self._buffer[-2000:])
            return False
        said = bytes(self._buffer[at : end + 1])
        if said != SENTINEL:
            raise ProtocolError(f"the agent speaks {said!r}, this Stoker {SENTINEL!r}: use one version on all hosts")
        del self._buffer[: end + 1]
        self._await_sentinel = False
        return True
