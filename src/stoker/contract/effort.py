"""A limit on what looking at a stranger's file may take, of CPU time and memory: what gets past every other bound ends here,
in one line with its name.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time

from stoker.contract.memory import Bounded
from stoker.contract.names import EX_DATAERR, Refusal

SECONDS, BYTES_A_SECOND = 4.0, 4 << 20  # in any case; and of the file for each second more
ROOM, TIMES = 1 << 30, 16  # bytes in any case; and for each of the file
_LOOK_S, _AGAIN_S = 0.05, 0.5


class _TooLong(BaseException):
    """Not an Exception: whoever is interrupted can't mistake it for a problem of its own."""


class LookingAt:
    """Within it, reading may take `seconds` of this thread's CPU time and `room` bytes besides what the process has; more is
    refused. A thread of its own looks at the time, and interrupts this one between two steps of Python.
    """

    def __init__(self, what: str, seconds: float = SECONDS, room: int = ROOM) -> None:
        self._what, self._seconds, self._memory = what, seconds, Bounded(room)

    def __enter__(self) -> None:
        self._over, self._late = threading.Event(), False
        self._thread = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._thread)
        self._until = time.clock_gettime(self._clock) + self._seconds
        self._watch = threading.Thread(target=self._look, name="effort", daemon=True)
        self._watch.start()
        self._memory.__enter__()

    def _look(self) -> None:
        while not self._over.wait(_LOOK_S):
            if time.clock_gettime(self._clock) > self._until:  # and again, if what it meets is lost
                self._late, self._until = True, self._until + _AGAIN_S
                _raise_in(self._thread, _TooLong)

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: object) -> None:
        try:
            self._end()
        except _TooLong:  # it came while this ended
            self._end()
        if isinstance(problem, _TooLong) and self._late:
            why = f"takes more than {self._seconds:.0f} s of CPU time to look at"
            raise Refusal(f"{self._what} {why}, which no ordinary one does: it may be an attack", EX_DATAERR) from None
        if isinstance(problem, MemoryError):
            raise Refusal(
                f"{self._what} takes too much memory to look at: it may be an attack", EX_DATAERR
            ) from problem

    def _end(self) -> None:
        self._over.set()
        self._watch.join()
        _raise_in(self._thread, None)  # nothing is on its way any more
        self._memory.__exit__()


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    problem = None if kind is None else ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), problem)


def looking_at_file(what: str, *paths: str) -> LookingAt:
    """In proportion to their size."""
    size = 0
    for path in paths:
        with contextlib.suppress(OSError):  # whoever opens it says why
            size += os.path.getsize(path)
    return LookingAt(what, SECONDS + size / BYTES_A_SECOND, ROOM + TIMES * size)
