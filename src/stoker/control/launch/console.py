"""Writes the console of a run in a thread, so that a slow or closed terminal never holds up the run.

Whole lines that the console can't take in time are skipped, counted and reported. The ranks' files have everything.
The second half of this module cuts a rank's output into prefixed console lines and lines of the log files.
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

MAX_QUEUED = 24 << 20  # bytes
RESERVE = 2 << 20  # bytes for small pieces, such as lines of other ranks, when a flooding rank has filled the queue
SMALL = 16 << 10  # bytes of a small piece
PIECE_COST = 256  # bytes that a queued piece takes besides its own
# What arrives within this time after a write goes out together with the next one: a thread that woke for every line of
# 512 ranks would cost the main thread more than the lines do.
GATHER_S = 0.02
MAX_WRITE = 1 << 14
_CLEAR_LINE = b"\r\x1b[K"
_SKIPPED = b"stoker: %d lines skipped here: the console is slower than the output; all of it is in the run directory\n"


class Console:
    """Writes to stdout (stream 1) and stderr (stream 2) in a thread."""

    def __init__(self, out: int = 1, err: int = 2) -> None:
        self._fds = {1: out, 2: err}
        self._dead: set[int] = set()
        knows_codes = os.environ.get("TERM") != "dumb"
        self._terminal = {stream: os.isatty(fd) and knows_codes for stream, fd in self._fds.items()}
        self._colours = {stream: terminal and wants_colour() for stream, terminal in self._terminal.items()}
        self._target = {stream: _target_of(fd) for stream, fd in self._fds.items()}
        # By target: the end of its unfinished line, with a \r before it if the line is a progress bar.
        self._unfinished: dict[object, bytes] = {}
        self._queue: deque[tuple[int, bytes, bool]] = deque()
        self._size = 0
        self._skipped = {1: 0, 2: 0}
        self._skipped_total = 0
        self._ready = threading.Condition()
        self._is_idle = False  # the thread waits for something to write
        self._is_closing = False
        self._thread = threading.Thread(target=self._write, name="console", daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        return self._size > MAX_QUEUED

    def is_terminal(self, stream: int) -> bool:
        return self._terminal[stream]

    def uses_colour(self, stream: int) -> bool:
        return self._colours[stream]

    def columns(self, stream: int) -> int:
        """Return the terminal's current width, or 0 if it is unknown."""
        if not self._terminal[stream]:
            return 0
        try:
            return os.get_terminal_size(self._fds[stream]).columns
        except OSError:
            return 0

    def put(self, stream: int, data: bytes, own: bool = False) -> None:
        """Queue whole lines and return at once. They are skipped if the console is too far behind.

        `own` lines are Stoker's: they begin on a fresh line.
        """
        if not data or stream in self._dead:
            return
        with self._ready:
            if self._size > MAX_QUEUED + (RESERVE if len(data) <= SMALL else 0):
                self._skip(stream, data.count(b"\n") or 1)
                return
            if self._skipped[stream]:
                self._enqueue(stream, _SKIPPED % self._skipped[stream], True)
                self._skipped[stream] = 0
            self._enqueue(stream, data, own)
            if self._is_idle:
                self._is_idle = False
                self._ready.notify()

    def say(self, stream: int, text: str, colour: str = "") -> None:
        """Queue lines of Stoker. They may quote other programs: secrets are masked and control codes escaped."""
        text = wrap_text(escape_lines(mask_text(text)), self.columns(stream))
        self.put(stream, (colour_text(text, colour) if self._colours[stream] else text).encode() + b"\n", own=True)

    def skip(self, stream: int, lines: int) -> None:
        """Count lines that the caller has skipped."""
        with self._ready:
            self._skip(stream, lines)

    def settle(self, seconds: float = 2.0) -> None:
        """Wait until everything is written, or until `seconds` are over."""
        deadline = time.monotonic() + seconds
        while self._size and time.monotonic() < deadline:
            with self._ready:
                self._ready.notify()
            time.sleep(0.002)

    def close(self, seconds: float = 2.0) -> int:
        """Give the console time to catch up, and end the thread. Returns the number of lines that were skipped."""
        with self._ready:
            for stream, count in self._skipped.items():
                if count and stream not in self._dead:
                    self._enqueue(stream, _SKIPPED % count, True)
            self._is_closing = True
            self._ready.notify()
        size, deadline = self._size, time.monotonic() + seconds
        while self._thread.is_alive() and time.monotonic() < deadline:
            self._thread.join(0.02)
            if self._size < size:  # the queue shrinks: a slow console gets more time than a stuck one
                size, deadline = self._size, time.monotonic() + seconds
        return self._skipped_total

    def _skip(self, stream: int, lines: int) -> None:
        self._skipped[stream] += lines
        self._skipped_total += lines

    def _enqueue(self, stream: int, data: bytes, own: bool) -> None:
        self._queue.append((stream, data, own))
        self._size += len(data) + PIECE_COST

    # ---- in the thread ----

    def _write(self) -> None:
        while True:
            with self._ready:
                while not self._queue and not self._is_closing:
                    self._is_idle = True
                    self._ready.wait()
                if not self._queue:
                    break
                stream, pieces = self._take_pieces()
                size = sum(len(piece) + PIECE_COST for piece, _ in pieces)
            self._write_all(stream, self._join(stream, pieces))
            with self._ready:
                self._size -= size
                if not self._is_closing and self._size < MAX_WRITE:
                    self._ready.wait(GATHER_S)
        for stream, terminal in self._terminal.items():  # a progress bar that will not be redrawn
            if terminal and b"\r" in self._unfinished.pop(self._target[stream], b""):
                self._write_all(stream, _CLEAR_LINE)

    def _take_pieces(self) -> tuple[int, list[tuple[bytes, bool]]]:
        """Take the oldest pieces of one stream, as many as one write takes, or a single longer one."""
        stream, first, own = self._queue.popleft()
        pieces, size = [(first, own)], len(first)
        while self._queue and self._queue[0][0] == stream and size + len(self._queue[0][1]) <= MAX_WRITE:
            _, piece, own = self._queue.popleft()
            pieces.append((piece, own))
            size += len(piece)
        return stream, pieces

    def _join(self, stream: int, pieces: list[tuple[bytes, bool]]) -> bytes:
        """Join pieces, with what the unfinished line before each needs: a newline, or its bar cleared."""
        target, joined = self._target[stream], []
        unfinished = self._unfinished.get(target, b"")
        for piece, own in pieces:
            at_start = not unfinished or unfinished.endswith(b"\r")
            has_bar = b"\r" in unfinished
            if self._terminal[stream] and (has_bar or (own and at_start)) and (own or at_start):
                joined.append(_CLEAR_LINE)  # also at the start of a line: the terminal itself writes ^C there
            elif own and unfinished:
                joined.append(b"\n")
            joined.append(piece)
            rest = piece[piece.rfind(b"\n") + 1 :]
            is_bar = b"\r" in rest or (b"\n" not in piece and has_bar)
            unfinished = (b"\r" if is_bar else b"") + rest[-1:] if rest else b""
        self._unfinished[target] = unfinished
        return b"".join(joined)

    def _write_all(self, stream: int, data: bytes) -> None:
        view = memoryview(data)
        while view and stream not in self._dead:
            try:
                view = view[os.write(self._fds[stream], view[: 1 << 16]) :]
            except BlockingIOError:
                time.sleep(0.01)  # another program made the terminal non-blocking: only this thread waits
            except OSError:
                self._dead.add(stream)  # `| head -1`, or a closed terminal: the run continues without this stream


def _target_of(fd: int) -> object:
    """Return a key that is equal for streams to the same terminal, file or pipe: they share an unfinished line."""
    try:
        status = os.fstat(fd)
    except OSError:  # the parent process closed it
        return fd
    return status.st_dev, status.st_ino, status.st_rdev


# ---- lines of a rank, for the console and for its log. Pure ----

MAX_LINE = 32 << 20  # bytes; a longer line is shown in pieces, to bound the memory
_MAX_BAR = 1 << 20  # bytes; longer text is no progress bar
_RECIPE_START = b"INFO | ["  # begins the lines that are shortened as a whole
_RECORD = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r)")
# Terminal codes for colours, cursor moves and titles.
_CODES = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]")


class LineCutter:
    """Makes console lines of one stream of a rank. A carriage return ends a line too (progress bars), unless \\n follows."""

    def __init__(self, prefix: bytes, shorten: Callable[[bytes], bytes | None] | None = None) -> None:
        """`shorten` maps a line without its newline to the text to show, or to None to hide it."""
        self.prefix = prefix
        self.mid_line = False  # an unfinished line has been shown, and the next bytes continue it
        self._shorten = shorten
        self._rest = bytearray()
        self._in_bar = False  # the unfinished line is the next state of a progress bar

    def feed(self, data: bytes) -> bytes:
        """Return the finished lines, each with its prefix, and keep the unfinished rest."""
        cut = max(data.rfind(b"\n"), data.rfind(b"\r", 0, max(len(data) - 1, 0))) + 1  # a last \r may be half of \r\n
        if cut:
            lines = bytes(self._rest + data[:cut])
            self._rest = bytearray(data[cut:])
        elif self._rest.endswith(b"\r") and data:
            lines = bytes(self._rest)
            self._rest = bytearray(data)
        else:
            self._rest += data
            return self._take_unfinished() if len(self._rest) > MAX_LINE else b""
        self._in_bar = lines.endswith(b"\r")
        return self._add_prefixes(lines)

    def flush(self) -> bytes:
        """Return the rest when the rank has ended, with the newline it lacks. A progress bar is not shown again."""
        rest, self._rest = bytes(self._rest), bytearray()
        if self._in_bar:
            self.mid_line = False
        if self._in_bar or (not rest and not self.mid_line):
            return b""
        return self._add_prefixes(rest + (b"" if rest.endswith(b"\r") else b"\n"))

    def drop(self) -> None:
        """Forget the unfinished line: its end was skipped."""
        self._rest.clear()
        self.mid_line = False

    def partial(self) -> bytes:
        """Return the unfinished line, for the prompts and progress of a rank that alone uses the console."""
        is_shortened = self._shorten is not None and not self.mid_line
        if is_shortened and self._rest.lstrip(b"\r").startswith(_RECIPE_START):
            return b""
        return self._take_unfinished()

    def _take_unfinished(self) -> bytes:
        if not self._rest or self._rest.endswith(b"\r"):
            return b""
        text = (b"" if self.mid_line else self.prefix) + bytes(self._rest)
        self._rest.clear()
        self.mid_line = True
        return text

    def _add_prefixes(self, text: bytes) -> bytes:
        if self._shorten is not None:
            text = self._shorten_lines(text)
            if not text:
                return b""
        first_prefix, self.mid_line = (b"" if self.mid_line else self.prefix), False
        if b"\r" not in text:
            return first_prefix + text[:-1].replace(b"\n", b"\n" + self.prefix) + b"\n"
        # A progress bar begins with a line that is only a \r: it needs no prefix.
        lines = [line if line == b"\r" else self.prefix + line for line in _RECORD.findall(text)]
        if not first_prefix and lines[0] != b"\r":
            lines[0] = lines[0][len(self.prefix) :]
        return b"".join(lines)

    def _shorten_lines(self, text: bytes) -> bytes:
        assert self._shorten is not None
        lines = text.split(b"\n")
        first = 1 if self.mid_line else 0  # the beginning of an unfinished line is on the screen already
        for index, line in enumerate(lines[first:-1], first):
            start = line.rfind(b"\r", 0, max(len(line) - 1, 0)) + 1  # after a bar, which stays; a last \r is of \r\n
            shortened = self._shorten(line[start:])
            clear = b"\x1b[K" if start else b""  # the bar may be longer than the line
            lines[index] = line[:start] + (b"" if shortened is None else clear + shortened + b"\n")
        if first and len(lines) > 1:
            lines[0] += b"\n"
        return b"".join(lines)


class LogLines:
    """Makes the log file's lines of one stream of a rank: as a terminal would show them in the end, without control codes."""

    def __init__(self) -> None:
        self._rest = b""
        self._is_continued = False  # the beginning of the unfinished line is in the file already

    @property
    def unfinished(self) -> int:
        """Bytes of an unfinished line that could be written now. A progress bar waits for its last state."""
        return 0 if b"\r" in self._rest and len(self._rest) < _MAX_BAR else len(self._rest)

    def feed(self, data: bytes) -> bytes:
        """Return the finished lines."""
        text = self._rest + data if self._rest else data
        cut = text.rfind(b"\n") + 1
        self._rest = text[cut:]
        last = self._rest.rfind(b"\r", 0, max(len(self._rest) - 1, 0))  # a last \r may be half of \r\n
        if last > 0:
            self._rest = self._rest[last:]
        return self._clean(text[:cut]) if cut else b""

    def partial(self) -> bytes:
        """Return the beginning of the unfinished line."""
        if not self.unfinished:
            return b""
        text, self._rest = self._rest, b""
        self._is_continued = True
        return _CODES.sub(b"", text)

    def flush(self) -> bytes:
        """Return the rest when the rank has ended."""
        text, self._rest = self._rest, b""
        return self._clean(text.removesuffix(b"\r")) if text else b""

    def _clean(self, text: bytes) -> bytes:
        is_continued, self._is_continued = self._is_continued, False
        if b"\r" not in text and b"\x1b" not in text:
            return text
        *lines, last = text.split(b"\n")
        shown = [*map(_last_state, lines), last[last.rfind(b"\r") + 1 :]]
        overwrites = len(shown[0]) < (text.find(b"\n") if lines else len(last))
        newline = b"\n" if is_continued and overwrites else b""  # what is in the file can't be overwritten
        return newline + _CODES.sub(b"", b"\n".join(shown))


def _last_state(line: bytes) -> bytes:
    """Return what follows a line's last carriage return, apart from one that belongs to its newline."""
    return line[line.rfind(b"\r", 0, len(line) - line.endswith(b"\r")) + 1 :]
