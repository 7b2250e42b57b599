"""The few Linux calls Python has no word for."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

from stoker.contract.process import read_kernel_file

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PTRACER = 0x59616D61
_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int | bytes) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def become_subreaper() -> None:
    """Orphans below us become our children, whatever session they moved to."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """The signal when the thread that forked us ends. Call right after fork; checks that it did not happen already."""
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os._exit(1)


def tracing_is_restricted() -> bool:
    """Yama's mode 1: a process may be traced by its ancestors and by whom it names."""
    return read_kernel_file("/proc/sys/kernel/yama/ptrace_scope").strip() == "1"


def allow_tracing_by(agent: int) -> None:
    """Lets the agent and its children (py-spy) read this process's stack under Yama; needless elsewhere."""
    if tracing_is_restricted():
        with contextlib.suppress(OSError):  # a sandbox that refuses it costs stacks, not the rank
            _prctl(_PR_SET_PTRACER, agent)


def set_name(name: bytes) -> None:
    _prctl(_PR_SET_NAME, name)
