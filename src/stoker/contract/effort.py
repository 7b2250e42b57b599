"""Looking at a stranger's file: a limit on what it may take of CPU time and memory, and one line with its name for whatever gets
past every other check. Only around reading a file and making sense of it: elsewhere a traceback is what a bug needs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType

from stoker.contract.memory import Bounded
from stoker.contract.names import EX_DATAERR, EX_NOINPUT, Refusal
from stoker.contract.untrusted import stored_size

SECONDS, BYTES_A_SECOND = 4.0, 4 << 20  # in any case; and of the file for each second more
ROOM, TIMES = 1 << 30, 16  # bytes in any case; and for each of the file
_LONGEST = 200  # characters of an exception's text
_AGAIN_S = 0.1  # of the process's CPU time, between two looks


class _TooLong(BaseException):
    """Not an Exception: whoever is interrupted can't mistake it for a problem of its own."""


def unreadable(what: str, problem: Exception) -> Refusal:
    """With the line of ours that failed: a report of a bug needs it."""
    if isinstance(problem, OSError):
        return Refusal(f"{what} can't be read: {problem.strerror or problem}", EX_NOINPUT)
    trace, place = problem.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if f"{os.sep}stoker{os.sep}" in code.co_filename and code not in _OWN:
            place = f" ({os.path.basename(code.co_filename)}:{trace.tb_lineno})"
        trace = trace.tb_next
    why = ": ".join(filter(None, (type(problem).__name__, str(problem).strip().partition("\n")[0][:_LONGEST])))
    return Refusal(f"{what} can't be read: {why}{place}", EX_DATAERR)


@contextlib.contextmanager
def reading(what: str, *but: type[Exception]) -> Iterator[None]:
    """The line alone, where sizes are bounded already. `but`: what whoever reads answers itself, and what the system says."""
    try:
        yield
    except Exception as problem:
        if isinstance(problem, (*_ANSWERED, OSError, *but)):
            raise
        raise unreadable(what, problem) from problem


# A refusal is what we want; a pipe breaks when whoever reads what we print has enough; memory has a line of its own.
_ANSWERED = (Refusal, BrokenPipeError, MemoryError)


class LookingAt:
    """Within it, reading may take `seconds` of this thread's CPU time and `room` bytes besides what the process has; more is
    refused, and so is whatever is raised there. The time is limited in the main thread only, where commands and ranks read: no other can be interrupted.
    """

    def __init__(self, what: str, seconds: float = SECONDS, room: int = ROOM, *but: type[Exception]) -> None:
        """`but`: exceptions that whoever reads answers itself."""
        self._what, self._seconds, self._memory, self._but = what, seconds, Bounded(room), but
        self._timed = threading.current_thread() is threading.main_thread()
        self._over = self._late = False

    def __enter__(self) -> None:
        if self._timed:
            self._until = time.thread_time() + self._seconds
            self._around = signal.signal(signal.SIGPROF, self._interrupt)
            self._timer = signal.setitimer(signal.ITIMER_PROF, _AGAIN_S, _AGAIN_S)
        # A library's log that finds no memory prints a traceback of its own otherwise.
        self._logs = sys.modules.get("logging")
        self._complains = self._logs is not None and self._logs.raiseExceptions
        if self._logs is not None:
            self._logs.raiseExceptions = False  # type: ignore[attr-defined]
        self._memory.__enter__()

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: object) -> None:
        self._over = True
        self._memory.__exit__()
        if self._logs is not None:
            self._logs.raiseExceptions = self._complains  # type: ignore[attr-defined]
        if self._timed:
            signal.setitimer(signal.ITIMER_PROF, *self._timer)
            signal.signal(signal.SIGPROF, self._around)
        if isinstance(problem, _TooLong) and self._late:
            why = f"takes more than {self._seconds:.0f} s of CPU time to look at"
            raise Refusal(f"{self._what} {why}, which no ordinary file does: it may be an attack", EX_DATAERR) from None
        if isinstance(problem, MemoryError):
            raise Refusal(
                f"{self._what} takes too much memory to look at: it may be an attack", EX_DATAERR
            ) from problem
        if isinstance(problem, Exception) and not isinstance(problem, (*_ANSWERED, *self._but)):
            raise unreadable(self._what, problem) from problem

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Again and again, until it is over: what is raised here may be lost. While a limit begins or ends, nothing is."""
        if _is_ours(frame):
            return
        if callable(self._around):
            self._around(number, frame)
        if not self._over and time.thread_time() > self._until:
            self._late = True
            raise _TooLong


# A limit within a function of @contextmanager begins and ends by way of contextlib's own two: interrupted there, after a body
# whose memory took long to free, it would never end.
_GENERATED = type(contextlib.contextmanager(lambda: iter(()))())
_OWN = {one.__code__ for kind in (LookingAt, Bounded, _GENERATED) for one in (kind.__enter__, kind.__exit__)}


def _is_ours(frame: FrameType | None) -> bool:
    """Or is called by what is; that calls nothing deep."""
    for _ in range(4):
        if frame is None:
            return False
        if frame.f_code in _OWN:
            return True
        frame = frame.f_back
    return False


def looking_at_file(what: str, *paths: str) -> LookingAt:
    """In proportion to their size."""
    size = _stored(paths)
    return LookingAt(what, SECONDS + size / BYTES_A_SECOND, ROOM + TIMES * size)


def all_of_them(what: str, paths: Sequence[str]) -> LookingAt:
    """The same of files that are looked at one by one, each within its own limit of time, and kept together in memory."""
    size = _stored(paths)
    return LookingAt(what, SECONDS * max(len(paths), 1) + size / BYTES_A_SECOND, ROOM + TIMES * size)


def _stored(paths: Sequence[str]) -> int:
    """Each file counts once, however many names it has."""
    sizes: dict[tuple[int, int], int] = {}
    for path in paths:
        with contextlib.suppress(OSError):  # whoever opens it says why
            about = os.stat(path)
            sizes[about.st_dev, about.st_ino] = stored_size(path)
    return sum(sizes.values())
