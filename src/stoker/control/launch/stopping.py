"""Tells a run's launcher, another process, to stop or to outlive its terminal: by a signal it understands, and only if it is that process."""

from __future__ import annotations

import os
import signal

from stoker.contract.names import DETACH_SIGNAL, EX_NOPERM, EX_UNAVAILABLE, STOP_NOW_SIGNAL, Refusal
from stoker.control.machine import processes
from stoker.control.record.reader import Run, alive


def ask_to_stop(run: Run, now: bool) -> None:
    _tell(run, STOP_NOW_SIGNAL if now else signal.SIGTERM)


def ask_to_detach(run: Run) -> None:
    _tell(run, DETACH_SIGNAL)


def _tell(run: Run, signum: int) -> None:
    pid, _, host = run.launcher
    if host and host != os.uname().nodename:
        raise Refusal(f"run {run.id} runs on host {host}: do this there", EX_UNAVAILABLE)
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError as problem:
        raise Refusal(f"run {run.id}: its launcher (pid {pid}) is gone", EX_UNAVAILABLE) from problem
    try:
        if not alive(run):  # compared after the handle was taken: the handle can't change its process any more
            raise Refusal(f"run {run.id}: its launcher (pid {pid}) is gone", EX_UNAVAILABLE)
        if signum == DETACH_SIGNAL and not processes.catches(pid, signum):
            raise Refusal(f"run {run.id} was started by a Stoker that can't detach; in its terminal: Ctrl-Z, then `bg` and `disown -h`", EX_UNAVAILABLE)
        signal.pidfd_send_signal(handle, signum)
    except PermissionError as problem:
        raise Refusal(f"run {run.id} belongs to another user", EX_NOPERM) from problem
    finally:
        os.close(handle)
