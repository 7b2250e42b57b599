"""prctl: the Linux calls on a process that Python's standard library lacks."""

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
    """Make orphaned descendants our children, whatever session they moved to."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Have the kernel signal us when the thread that forked us ends. Exit if it has ended already.

    Call it right after fork.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os._exit(1)


def is_tracing_restricted() -> bool:
    """Return whether Yama is in mode 1: only ancestors, and processes it names, may trace a process."""
    return read_kernel_file("/proc/sys/kernel/yama/ptrace_scope").strip() == "1"


def allow_tracing_by(agent: int) -> None:
    """Allow the agent and its children (py-spy) to read this process's stack where Yama forbids it."""
    if is_tracing_restricted():
        with contextlib.suppress(OSError):  # a sandbox that refuses this costs stacks, not the rank
            _prctl(_PR_SET_PTRACER, agent)


def set_name(name: bytes) -> None:
    """Set the name of this process in ps and top."""
    _prctl(_PR_SET_NAME, name)
