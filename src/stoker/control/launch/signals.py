"""The signals that reach a run's launcher: caught at any moment, acted on where the run can; and sending them to one."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from stoker.contract.env_vars import DETACH_SIGNAL, STOP_NOW_SIGNAL
from stoker.contract.errors import EX_NOPERM, EX_UNAVAILABLE, EX_USAGE, Refusal
from stoker.contract.process import find_process, send_signal
from stoker.contract.text import escape
from stoker.control.machine import procfs
from stoker.control.plan.options import RunOptions
from stoker.control.record.run_record import RunRecord, is_alive

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # the signals that stop a run


@contextlib.contextmanager
def handled(signums: Iterable[int], handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Within it these signals go to `handler`; those that were ignored (nohup) stay ignored."""
    before = {signum: signal.getsignal(signum) for signum in signums}
    heard = {signum: former for signum, former in before.items() if former is not signal.SIG_IGN}
    for signum in heard:
        signal.signal(signum, handler)
    try:
        yield
    finally:
        for signum, former in heard.items():
            signal.signal(signum, former)


class Interrupted(Exception):
    """A signal came before anything was started."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class SignalQueue:
    """`tell`: records an event, once there is a record."""

    def __init__(self, options: RunOptions, say: Callable[[str], None], tell: Callable[..., None]) -> None:
        self._options = options
        self._say = say
        self._tell = tell
        self._pending: list[int] = []
        self._stays_after_hangup = options.on_hangup == "detach"

    def catch(self) -> None:
        """--signals-to-handle and the four that stop a run: unhandled, one would cost the ranks their last save."""
        for signum in dict.fromkeys((*STOPS, *_named(self._options.signals_to_handle))):
            if signum == signal.SIGHUP and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
                continue  # nohup
            signal.signal(signum, self._on_signal)
        signal.signal(DETACH_SIGNAL, self._on_signal)
        if signal.getsignal(signal.SIGTSTP) is not signal.SIG_IGN:
            signal.signal(signal.SIGTSTP, self._on_signal)
        signal.signal(STOP_NOW_SIGNAL, lambda *_: self._pending.extend((signal.SIGTERM, signal.SIGKILL)))

    def _on_signal(self, signum: int, _frame: object) -> None:
        self._pending.append(signum)

    def take(self) -> int:
        """The oldest to act on; 0: none. A detach, or the hangup of a run that outlives its terminal, is none."""
        while self._pending:
            signum = self._pending.pop(0)
            if signum == DETACH_SIGNAL:
                self._stays_after_hangup = True
                self._say("stoker: detached: the run continues when this terminal closes")
                self._tell("detach")
            elif signum == signal.SIGHUP and self._stays_after_hangup:
                self._say("stoker: the terminal is closed; the run continues in the background")
                self._tell("hangup")
            else:
                return signum
        return 0


def _named(text: str) -> list[signal.Signals]:
    named: list[signal.Signals] = []
    for word in text.split(","):
        name = word.strip().upper()
        signum = getattr(signal, name if name.startswith("SIG") else f"SIG{name}", None)
        if not isinstance(signum, signal.Signals) or signum in (signal.SIGKILL, signal.SIGSTOP):
            raise Refusal(f"--signals-to-handle: no signal {word.strip()!r} that can be handled", EX_USAGE)
        named.append(signum)
    return named


# ---- telling the launcher of a run, another process: only if it is that process ----


def signal_launcher(run: RunRecord, signum: int) -> None:
    pid, _, host = run.launcher
    shown = escape(run.id)
    if not run.mine:
        raise Refusal(f"run {shown} belongs to {run.user}, and only that user can stop it", EX_NOPERM)
    if host and host != os.uname().nodename:
        raise Refusal(f"run {shown} runs on host {escape(host)}: run this command there", EX_UNAVAILABLE)
    launcher = find_process(pid)
    if launcher is not None and is_alive(run) is None:
        unknown = f"pid {pid} ({escape(launcher.name)}) does not show whether it is the launcher"
        raise Refusal(f"run {shown}: {unknown}, so it is not signalled", EX_UNAVAILABLE)
    if signum == DETACH_SIGNAL and launcher is not None and is_alive(run) and not procfs.catches(pid, signum):
        how = "in its terminal: Ctrl-Z, then `bg` and `disown -h`"
        raise Refusal(f"run {shown} was started by a Stoker that can't detach; {how}", EX_UNAVAILABLE)
    if launcher is None or not send_signal(launcher, signum, lambda: is_alive(run) is True):
        raise Refusal(f"run {shown}: its launcher (pid {pid}) is gone", EX_UNAVAILABLE)
