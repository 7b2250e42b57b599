"""Asks a run's launcher, another process, to stop: by the signal it understands, and only if it is that process."""

from __future__ import annotations

import os
import signal

from stoker.contract.names import EX_NOPERM, EX_UNAVAILABLE, STOP_NOW_SIGNAL, Refusal
from stoker.control.record.reader import Run, alive


def ask_to_stop(run: Run, now: bool) -> None:
    pid, _, host = run.launcher
    if host and host != os.uname().nodename:
        raise Refusal(f"run {run.id} runs on host {host}: stop it there", EX_UNAVAILABLE)
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError as problem:
        raise Refusal(f"run {run.id}: its launcher (pid {pid}) is gone", EX_UNAVAILABLE) from problem
    try:
        if not alive(run):  # compared after the handle was taken: the handle can't change its process any more
            raise Refusal(f"run {run.id}: its launcher (pid {pid}) is gone", EX_UNAVAILABLE)
        signal.pidfd_send_signal(handle, STOP_NOW_SIGNAL if now else signal.SIGTERM)
    except PermissionError as problem:
        raise Refusal(f"run {run.id} belongs to another user", EX_NOPERM) from problem
    finally:
        os.close(handle)
