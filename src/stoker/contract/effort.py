"""A limit on what looking at a stranger's file may take, of CPU time and memory: what gets past every other bound ends here,
in one line with its name.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import FrameType

from stoker.contract.memory import Bounded
from stoker.contract.names import EX_DATAERR, Refusal

SECONDS, BYTES_A_SECOND = 4.0, 4 << 20  # in any case; and of the file for each second more
ROOM, TIMES = 1 << 30, 16  # bytes in any case; and for each of the file
_AGAIN_S = 0.1  # of the process's CPU time, between two looks


class _TooLong(BaseException):
    """Not an Exception: whoever is interrupted can't mistake it for a problem of its own."""


class LookingAt:
    """Within it, reading may take `seconds` of this thread's CPU time and `room` bytes besides what the process has; more is
    refused. The time is limited in the main thread only, where commands and ranks read: no other can be interrupted.
    """

    def __init__(self, what: str, seconds: float = SECONDS, room: int = ROOM) -> None:
        self._what, self._seconds, self._memory = what, seconds, Bounded(room)
        self._timed = threading.current_thread() is threading.main_thread()
        self._over = self._late = False

    def __enter__(self) -> None:
        if self._timed:
            self._until = time.thread_time() + self._seconds
            self._around = signal.signal(signal.SIGPROF, self._interrupt)
            self._timer = signal.setitimer(signal.ITIMER_PROF, _AGAIN_S, _AGAIN_S)
        self._memory.__enter__()

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: object) -> None:
        self._over = True
        self._memory.__exit__()
        if self._timed:
            signal.setitimer(signal.ITIMER_PROF, *self._timer)
            signal.signal(signal.SIGPROF, self._around)
        if isinstance(problem, _TooLong) and self._late:
            why = f"takes more than {self._seconds:.0f} s of CPU time to look at"
            raise Refusal(f"{self._what} {why}, which no ordinary one does: it may be an attack", EX_DATAERR) from None
        if isinstance(problem, MemoryError):
            raise Refusal(
                f"{self._what} takes too much memory to look at: it may be an attack", EX_DATAERR
            ) from problem

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
    size = 0
    for path in paths:
        with contextlib.suppress(OSError):  # whoever opens it says why
            size += os.path.getsize(path)
    return LookingAt(what, SECONDS + size / BYTES_A_SECOND, ROOM + TIMES * size)
