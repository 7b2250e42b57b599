"""A rank's bytes become console lines: whole, prefixed, never torn. Pure."""

from __future__ import annotations

import re

LONGEST = 32 << 20  # a line longer than this is shown in pieces: memory is finite
_RECORD = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r)")


class LineCutter:
    """One rank's one stream. A carriage return ends a record too (progress bars), unless a newline follows it."""

    def __init__(self, prefix: bytes) -> None:
        self.prefix = prefix
        self._rest = bytearray()
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
        """What is left when the rank has ended: shown with the newline it lacks."""
        rest, self._rest = bytes(self._rest), bytearray()
        if not rest and not self.mid_line:
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
