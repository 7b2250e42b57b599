"""A rank's bytes become console lines (whole, prefixed, never torn) and lines of its log (without progress bars and
control codes). Pure.
"""

from __future__ import annotations

import re

LONGEST = 32 << 20  # a line longer than this is shown in pieces: memory is finite
_RECORD = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r)")
_OVERWRITTEN = re.compile(rb"[^\n]*\r(?!\n)")  # what stands before a line's last carriage return
_CODES = re.compile(
    rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]"
)  # colours, cursor moves, titles


class LineCutter:
    """One rank's one stream. A carriage return ends a record too (progress bars), unless a newline follows it."""

    def __init__(self, prefix: bytes) -> None:
        self.prefix = prefix
        self._rest = bytearray()
        self._in_bar = False  # the unfinished line is the next state of a progress bar
        self.mid_line = False  # an unfinished line has been shown: what follows continues it

    def feed(self, data: bytes) -> bytes:
        """The finished records, each with its prefix. Unfinished ones wait for their end, however long."""
        cut = max(data.rfind(b"\n"), data.rfind(b"\r", 0, max(len(data) - 1, 0))) + 1  # a last \r may be half of \r\n
        if cut:
            done = bytes(self._rest + data[:cut])
            self._rest = bytearray(data[cut:])
        elif self._rest.endswith(b"\r") and data:
            done = bytes(self._rest)
            self._rest = bytearray(data)
        else:
            self._rest += data
            return self.partial() if len(self._rest) > LONGEST else b""
        self._in_bar = done.endswith(b"\r")
        return self._dress(done)

    def _dress(self, text: bytes) -> bytes:
        head, self.mid_line = (b"" if self.mid_line else self.prefix), False
        if b"\r" not in text:
            return head + text[:-1].replace(b"\n", b"\n" + self.prefix) + b"\n"
        # A record with nothing but its \r is how a progress bar begins: there is nothing to put a prefix before.
        records = [record if record == b"\r" else self.prefix + record for record in _RECORD.findall(text)]
        if not head and records[0] != b"\r":
            records[0] = records[0][len(self.prefix) :]
        return b"".join(records)

    def flush(self) -> bytes:
        """What is left when the rank has ended: shown with the newline it lacks. A progress bar that will not go on is
        not drawn again.
        """
        rest, self._rest = bytes(self._rest), bytearray()
        if self._in_bar:
            self.mid_line = False
        if self._in_bar or (not rest and not self.mid_line):
            return b""
        return self._dress(rest + (b"" if rest.endswith(b"\r") else b"\n"))

    def drop(self) -> None:
        """Forgets the line under way: its end was skipped."""
        self._rest.clear()
        self.mid_line = False

    def partial(self) -> bytes:
        """An unfinished line, as it stands: for the one rank that has the console to itself (prompts, progress)."""
        if not self._rest or self._rest.endswith(b"\r"):
            return b""
        shown = (b"" if self.mid_line else self.prefix) + bytes(self._rest)
        self._rest.clear()
        self.mid_line = True
        return shown


class LogLines:
    """One rank's one stream, for its file: what a terminal would show in the end. Of a progress bar that is its last
    state, of control codes nothing.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._written = False  # the beginning of the line under way is in the file already

    @property
    def unfinished(self) -> int:
        """Bytes that could be written now, without the end of their line. A bar waits for its last state."""
        return 0 if b"\r" in self._rest else len(self._rest)

    def feed(self, data: bytes) -> bytes:
        """The finished lines."""
        text = self._rest + data if self._rest else data
        cut = text.rfind(b"\n") + 1
        self._rest = text[cut:]
        last = self._rest.rfind(b"\r", 0, max(len(self._rest) - 1, 0))  # a last \r may be half of \r\n
        if last > 0:
            self._rest = self._rest[last:]
        return self._clean(text[:cut]) if cut else b""

    def partial(self) -> bytes:
        """The beginning of a line, as it stands."""
        if not self.unfinished:
            return b""
        text, self._rest = self._rest, b""
        self._written = True
        return _CODES.sub(b"", text)

    def flush(self) -> bytes:
        """What is left when the rank has ended."""
        text, self._rest = self._rest, b""
        return self._clean(text.removesuffix(b"\r")) if text else b""

    def _clean(self, text: bytes) -> bytes:
        continued, self._written = self._written, False
        if b"\r" not in text and b"\x1b" not in text:
            return text
        first = text[: text.find(b"\n") + 1 or len(text)]
        fresh = b"\n" if continued and _OVERWRITTEN.match(first) else b""  # what is in the file can't be overwritten
        return fresh + _CODES.sub(b"", _OVERWRITTEN.sub(b"", text))
