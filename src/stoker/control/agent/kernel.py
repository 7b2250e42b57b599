"""The few Linux calls Python has no word for, and signalling that can't hit a stranger."""

from __future__ import annotations

import ctypes
import os
import signal

from stoker.control.machine.processes import Process, process

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int | bytes) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def become_subreaper() -> None:
    """Orphans below us become our children, whatever session they moved to."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """SIGKILL when the thread that forked us ends. Call right after fork; checks that it did not happen already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def set_name(name: bytes) -> None:
    _prctl(_PR_SET_NAME, name)


def send(who: Process, signum: int) -> bool:
    """Signals exactly this process: by pidfd, after comparing its start time, so a reused pid is never hit."""
    try:
        handle = os.pidfd_open(who.pid)
    except (ProcessLookupError, PermissionError):
        return False
    try:
        now = process(who.pid)
        if now is None or now.start != who.start:
            return False
        signal.pidfd_send_signal(handle, signum)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(handle)
    return True
