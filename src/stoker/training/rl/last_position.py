"""Where a process that runs a user's code last was, readable after its death. Standard library only.

The parent makes a file in memory and passes it on; the child writes into it what it works on. An exit by os._exit, a signal to
itself and a fatal error leave the exact line; after any other kill it is the one of the last 0.1 s of computing.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

_DUMP = 4096  # the position is before this offset, faulthandler's stack behind it
_SAMPLE_S = 0.1  # of computing, between two looks at the line
_FRAME = re.compile(r'File "(.*)", line (\d+)')


class Position(NamedTuple):
    function: int  # which of the functions
    item: int | None  # which answer or rollout; None: it is not known
    file: str
    line: int  # 0: it is not known


class PositionFile:
    """The parent's side."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("stoker-position", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, _DUMP)
        os.lseek(self.descriptor, _DUMP, os.SEEK_SET)  # the child shares this offset: its stack goes there

    def read(self) -> Position | None:
        """Return the last position, or None if the child was not running a user's code."""
        text = os.pread(self.descriptor, _DUMP, 0).partition(b"\n")[0]
        try:
            function, item, file, line = json.loads(text)
        except ValueError:
            return None
        dump = os.pread(self.descriptor, 1 << 16, _DUMP).decode("utf-8", "replace")
        frames = _FRAME.findall(dump.rpartition("Current thread")[2] or dump)
        own = [number for name, number in frames if os.path.abspath(name) == file]
        return Position(function, item, file, int(own[0]) if own else line)

    def close(self) -> None:
        os.close(self.descriptor)


class PositionWriter:
    """The child's side. One for a process."""

    def __init__(self, descriptor: int, current: Callable[[], int | None] = lambda: None) -> None:
        """`current`: which item the running code works on, where several take turns; None: the one entered last."""
        self._descriptor, self._current = descriptor, current
        self._position: tuple[int, int | None, str, int] | None = None
        faulthandler.enable(file=descriptor)
        for name in ("_exit", "kill"):
            self._watch(name)

    def sample(self) -> None:
        """Note the line that is being computed from time to time. Only in a process whose main thread calls user code."""
        signal.signal(signal.SIGPROF, lambda number, frame: self._at(frame))
        signal.siginterrupt(signal.SIGPROF, False)  # a system call in progress goes on
        signal.setitimer(signal.ITIMER_PROF, _SAMPLE_S, _SAMPLE_S)

    def enter(self, function: int, item: int | None, file: str, line: int) -> None:
        self._position = (function, item, file, line)
        self._write()

    def leave(self) -> None:
        self._position = None
        self._write()

    def _write(self) -> None:
        text = b"" if self._position is None else json.dumps(self._position).encode()
        with suppress(OSError):
            os.pwrite(self._descriptor, text[: _DUMP - 1] + b"\n", 0)

    def _at(self, frame: Any) -> None:
        if self._position is None:
            return
        function, item, file, _ = self._position
        while frame is not None and os.path.abspath(frame.f_code.co_filename) != file:
            frame = frame.f_back
        if frame is not None:
            current = self._current()
            self.enter(function, item if current is None else current, file, frame.f_lineno)

    def _watch(self, name: str) -> None:
        original = getattr(os, name)

        def watched(*given: Any) -> Any:
            self._at(sys._getframe(1))
            return original(*given)

        setattr(os, name, watched)


def first_line_of(function: Any) -> int:
    """Return the line a function begins at, or 0."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return 0 if code is None else int(code.co_firstlineno)


def described(position: Position | None, names: Sequence[str]) -> tuple[str, str]:
    """Return (name of the function, `file.py, line 3: ` where they are known)."""
    if position is None or not 0 <= position.function < len(names):
        return ", ".join(names), ""
    line = f"{os.path.basename(position.file)}, line {position.line}: " if position.file and position.line else ""
    return names[position.function], line
