"""Tells a run's launcher, another process, to stop or to outlive its terminal: by a signal it understands, and only if
it is that process.
"""

from __future__ import annotations

import os
import signal

from stoker.contract.names import DETACH_SIGNAL, EX_NOPERM, EX_UNAVAILABLE, STOP_NOW_SIGNAL, Refusal
from stoker.contract.process import process, send
from stoker.contract.untrusted import printable
from stoker.control.machine import processes
from stoker.control.record.reader import Run, alive


def ask_to_stop(run: Run, now: bool) -> None:
    _tell(run, STOP_NOW_SIGNAL if now else signal.SIGTERM)


def ask_to_detach(run: Run) -> None:
    _tell(run, DETACH_SIGNAL)


def _tell(run: Run, signum: int) -> None:
    pid, _, host = run.launcher
    shown = printable(run.id)
    if not run.mine:
        raise Refusal(f"run {shown} belongs to {run.user}, who alone can stop it", EX_NOPERM)
    if host and host != os.uname().nodename:
        raise Refusal(f"run {shown} runs on host {printable(host)}: do this there", EX_UNAVAILABLE)
    launcher = process(pid)
    if launcher is not None and alive(run) is None:
        raise Refusal(
            f"run {shown}: pid {pid} ({printable(launcher.name)}) does not show whether it is the launcher, so it is"
            " not signalled",
            EX_UNAVAILABLE,
        )
    if signum == DETACH_SIGNAL and launcher is not None and alive(run) and not processes.catches(pid, signum):
        raise Refusal(
            f"run {shown} was started by a Stoker that can't detach; in its terminal: Ctrl-Z, then `bg` and"
            " `disown -h`",
            EX_UNAVAILABLE,
        )
    if launcher is None or not send(launcher, signum, lambda: alive(run) is True):
        raise Refusal(f"run {shown}: its launcher (pid {pid}) is gone", EX_UNAVAILABLE)
