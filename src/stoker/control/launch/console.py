"""The console: a thread of its own writes, so that a slow or dead terminal never holds up the run.

What the console can't take in time is skipped in whole lines, counted and said; the ranks' files have everything.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable

from stoker.contract.masking import mask_text
from stoker.contract.terminal import colour_text, wants_colour, wrap_text
from stoker.contract.text import escape_lines

ROOM = 24 << 20
RESERVE = 2 << 20  # for small pieces: others' lines, and our own, when a flooding rank has filled the room
SMALL = 16 << 10
EACH = 256  # what a queued piece costs beyond its bytes
# What comes within this time of a write goes out together with the next: a thread that woke for every line of 512 ranks
# would cost the main one more than the lines do.
TOGETHER_S = 0.02
AT_ONCE = 1 << 14
_CLEARED = b"\r\x1b[K"
_LOST = b"stoker: %d lines skipped here: the console is slower than the output; all of it is in the run directory\n"


class Console:
    def __init__(self, out: int = 1, err: int = 2) -> None:
        self._handles = {1: out, 2: err}
        self._dead: set[int] = set()
        knows_codes = os.environ.get("TERM") != "dumb"
        self._terminal = {stream: os.isatty(handle) and knows_codes for stream, handle in self._handles.items()}
        self._colours = {stream: terminal and wants_colour() for stream, terminal in self._terminal.items()}
        self._target = {stream: _identity(handle) for stream, handle in self._handles.items()}
        # target -> the line under way there, as far as it matters: empty, text, or ending with or holding a \r
        self._line: dict[object, bytes] = {}
        self._queue: deque[tuple[int, bytes, bool]] = deque()
        self._size = 0
        self._skipped = {1: 0, 2: 0}
        self._skipped_total = 0
        self._ready = threading.Condition()
        self._idle = False  # the writer waits for something to write
        self._closing = False
        self._thread = threading.Thread(target=self._write, name="console", daemon=True)
        self._thread.start()

    @property
    def full(self) -> bool:
        return self._size > ROOM

    def put(self, stream: int, data: bytes, own: bool = False) -> None:
        """Whole lines, at once; when the console is behind they are dropped and counted. `own`: on a fresh line."""
        if not data or stream in self._dead:
            return
        with self._ready:
            if self._size > ROOM + (RESERVE if len(data) <= SMALL else 0):
                self._skip(stream, data.count(b"\n") or 1)
                return
            if self._skipped[stream]:
                self._enqueue(stream, _LOST % self._skipped[stream], True)
                self._skipped[stream] = 0
            self._enqueue(stream, data, own)
            if self._idle:
                self._idle = False
                self._ready.notify()

    def terminal(self, stream: int) -> bool:
        return self._terminal[stream]

    def in_colour(self, stream: int) -> bool:
        return self._colours[stream]

    def say(self, stream: int, text: str, colour: str = "") -> None:
        """Lines of our own. They quote what others wrote: secrets are masked, and control codes escaped."""
        text = wrap_text(escape_lines(mask_text(text)), self.columns(stream))
        self.put(stream, (colour_text(text, colour) if self._colours[stream] else text).encode() + b"\n", own=True)

    def columns(self, stream: int) -> int:
        """0: there is no terminal, or it does not say. Asked each time: windows change their size."""
        if not self._terminal[stream]:
            return 0
        try:
            return os.get_terminal_size(self._handles[stream]).columns
        except OSError:
            return 0

    def skip(self, stream: int, lines: int) -> None:
        with self._ready:
            self._skip(stream, lines)

    def _skip(self, stream: int, lines: int) -> None:
        self._skipped[stream] += lines
        self._skipped_total += lines

    def _enqueue(self, stream: int, data: bytes, own: bool) -> None:
        self._queue.append((stream, data, own))
        self._size += len(data) + EACH

    def _write(self) -> None:
        while True:
            with self._ready:
                while not self._queue and not self._closing:
                    self._idle = True
                    self._ready.wait()
                if not self._queue:
                    break
                stream, pieces = self._next()
                size = sum(len(piece) + EACH for piece, _ in pieces)
            self._write_all(stream, self._dress(stream, pieces))
            with self._ready:
                self._size -= size
                if not self._closing and self._size < AT_ONCE:
                    self._ready.wait(TOGETHER_S)
        for stream, terminal in self._terminal.items():  # a bar that nobody will redraw
            if terminal and b"\r" in self._line.pop(self._target[stream], b""):
                self._write_all(stream, _CLEARED)

    def _next(self) -> tuple[int, list[tuple[bytes, bool]]]:
        """The oldest pieces of one stream: what one write takes, or a single longer one."""
        stream, first, own = self._queue.popleft()
        pieces, size = [(first, own)], len(first)
        while self._queue and self._queue[0][0] == stream and size + len(self._queue[0][1]) <= AT_ONCE:
            _, piece, own = self._queue.popleft()
            pieces.append((piece, own))
            size += len(piece)
        return stream, pieces

    def _dress(self, stream: int, pieces: list[tuple[bytes, bool]]) -> bytes:
        target, dressed = self._target[stream], []
        under_way = self._line.get(target, b"")
        for piece, own in pieces:
            dressed += [self._before(stream, under_way, own), piece]
            rest = piece[piece.rfind(b"\n") + 1 :]
            bar = b"\r" in rest or (b"\n" not in piece and b"\r" in under_way)
            under_way = (b"\r" if bar else b"") + rest[-1:] if rest else b""
        self._line[target] = under_way
        return b"".join(dressed)

    def _before(self, stream: int, under_way: bytes, own: bool) -> bytes:
        """What the line under way needs before a piece. A terminal's progress bar, redrawn or over, is cleared."""
        at_start = not under_way or under_way.endswith(b"\r")
        if self._terminal[stream] and (b"\r" in under_way or (own and at_start)) and (own or at_start):
            return _CLEARED  # even at its start: the terminal itself writes ^C there
        return b"\n" if own and under_way else b""

    def _write_all(self, stream: int, data: bytes) -> None:
        view = memoryview(data)
        while view and stream not in self._dead:
            try:
                view = view[os.write(self._handles[stream], view[: 1 << 16]) :]
            except BlockingIOError:
                time.sleep(0.01)  # somebody made the terminal non-blocking: wait for room on this thread only
            except OSError:
                self._dead.add(stream)  # `| head -1`, a closed terminal: the run goes on without this stream

    def settle(self, seconds: float = 2.0) -> None:
        """Until all that was put is written, or so long: a console that stands still holds up nobody."""
        deadline = time.monotonic() + seconds
        while self._size and time.monotonic() < deadline:
            with self._ready:
                self._ready.notify()
            time.sleep(0.002)

    def close(self, seconds: float = 2.0) -> int:
        """Gives the console a little time to catch up. Returns how many lines it never got."""
        with self._ready:
            for stream, count in self._skipped.items():
                if count and stream not in self._dead:
                    self._enqueue(stream, _LOST % count, True)
            self._closing = True
            self._ready.notify()
        before, deadline = self._size, time.monotonic() + seconds
        while self._thread.is_alive() and time.monotonic() < deadline:
            self._thread.join(0.02)
            if self._size < before:  # it moves: a slow console gets more time than a stuck one
                before, deadline = self._size, time.monotonic() + seconds
        return self._skipped_total


def _identity(handle: int) -> object:
    """Two streams that go to one terminal, file or pipe share the line under way."""
    try:
        found = os.fstat(handle)
    except OSError:  # closed by whoever started us
        return handle
    return found.st_dev, found.st_ino, found.st_rdev


# ---- a rank's bytes become console lines (whole, prefixed, never torn) and lines of its log. Pure ----

LONGEST = 32 << 20  # a line longer than this is shown in pieces: memory is finite
_LONGEST_BAR = 1 << 20  # what is longer is no progress bar: it is written
_RECIPES = b"INFO | ["  # how the lines of a recipe begin, which are shortened as a whole
_RECORD = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r)")
# Colours, cursor moves, titles.
_CODES = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]")


class LineCutter:
    """One rank's one stream. A carriage return ends a record too (progress bars), unless a newline follows it."""

    def __init__(self, prefix: bytes, shorten: Callable[[bytes], bytes | None] | None = None) -> None:
        """`shorten`: a whole line, without its end, to the one that is shown in its place; None: it is not shown."""
        self.prefix = prefix
        self._shorten = shorten
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
            return self._begun() if len(self._rest) > LONGEST else b""
        self._in_bar = done.endswith(b"\r")
        return self._dress(done)

    def _dress(self, text: bytes) -> bytes:
        if self._shorten is not None:
            text = self._shortened(text)
            if not text:
                return b""
        head, self.mid_line = (b"" if self.mid_line else self.prefix), False
        if b"\r" not in text:
            return head + text[:-1].replace(b"\n", b"\n" + self.prefix) + b"\n"
        # A record with nothing but its \r is how a progress bar begins: there is nothing to put a prefix before.
        records = [record if record == b"\r" else self.prefix + record for record in _RECORD.findall(text)]
        if not head and records[0] != b"\r":
            records[0] = records[0][len(self.prefix) :]
        return b"".join(records)

    def _shortened(self, text: bytes) -> bytes:
        lines = text.split(b"\n")
        first = 1 if self.mid_line else 0  # its beginning is on the screen
        for at, line in enumerate(lines[first:-1], first):
            begin = line.rfind(b"\r", 0, max(len(line) - 1, 0)) + 1  # behind a bar, which stays; a last \r is of \r\n
            shown = self._shorten(line[begin:]) if self._shorten is not None else line[begin:]
            clear = b"\x1b[K" if begin else b""  # the bar may be longer than the line
            lines[at] = line[:begin] + (b"" if shown is None else clear + shown + b"\n")
        ended = [lines[0] + b"\n", *lines[1:]] if first and len(lines) > 1 else lines
        return b"".join(ended)

    def flush(self) -> bytes:
        """The rest when the rank has ended, with the newline it lacks. A bar that will not go on is not redrawn."""
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
        whole_only = self._shorten is not None and not self.mid_line and self._rest.lstrip(b"\r").startswith(_RECIPES)
        return b"" if whole_only else self._begun()

    def _begun(self) -> bytes:
        if not self._rest or self._rest.endswith(b"\r"):
            return b""
        shown = (b"" if self.mid_line else self.prefix) + bytes(self._rest)
        self._rest.clear()
        self.mid_line = True
        return shown


class LogLines:
    """One rank's one stream, for its file: as a terminal would show it in the end, without control codes."""

    def __init__(self) -> None:
        self._rest = b""
        self._written = False  # the beginning of the line under way is in the file already

    @property
    def unfinished(self) -> int:
        """Bytes that could be written now, without the end of their line. A bar waits for its last state."""
        return 0 if b"\r" in self._rest and len(self._rest) < _LONGEST_BAR else len(self._rest)

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
        *whole, last = text.split(b"\n")
        shown = [*map(_last_state, whole), last[last.rfind(b"\r") + 1 :]]
        overwritten = len(shown[0]) < text.find(b"\n") if whole else len(shown[0]) < len(last)
        fresh = b"\n" if continued and overwritten else b""  # what is in the file can't be overwritten
        return fresh + _CODES.sub(b"", b"\n".join(shown))


def _last_state(line: bytes) -> bytes:
    """What stands behind a line's last carriage return; one at its end belongs to the newline."""
    ends = line.endswith(b"\r")
    return line[line.rfind(b"\r", 0, len(line) - ends) + 1 :]
