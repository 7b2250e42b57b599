"""Catches signals to the launcher of a run until the run handles them, and sends signals to another launcher."""

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
    """Handle these signals with `handler` inside the `with` block. Signals that were ignored (nohup) stay ignored."""
    handlers = {signum: signal.getsignal(signum) for signum in signums}
    former_handlers = {signum: former for signum, former in handlers.items() if former is not signal.SIG_IGN}
    for signum in former_handlers:
        signal.signal(signum, handler)
    try:
        yield
    finally:
        for signum, former in former_handlers.items():
            signal.signal(signum, former)


class Interrupted(Exception):
    """A stop signal arrived while the launcher waited for its agents."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class SignalQueue:
    """Collects the signals to this launcher until the run takes them."""

    def __init__(self, options: RunOptions, log: Callable[[str], None], record_event: Callable[..., None]) -> None:
        self._options = options
        self._log = log
        self._record_event = record_event
        self._pending: list[int] = []
        self._survives_hangup = options.on_hangup == "detach"

    def catch(self) -> None:
        """Catch --signals-to-handle and the four that stop a run: with an uncaught one the ranks could not save."""
        for signum in dict.fromkeys((*STOPS, *_parse_signals(self._options.signals_to_handle))):
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
        """Return the oldest signal to act on, or 0. A detach, and the hangup of a run that survives it, are handled here."""
        while self._pending:
            signum = self._pending.pop(0)
            if signum == DETACH_SIGNAL:
                self._survives_hangup = True
                self._log("stoker: detached: the run continues when this terminal closes")
                self._record_event("detach")
            elif signum == signal.SIGHUP and self._survives_hangup:
                self._log("stoker: the terminal is closed; the run continues in the background")
                self._record_event("hangup")
            else:
                return signum
        return 0


def _parse_signals(text: str) -> list[signal.Signals]:
    """Parse --signals-to-handle."""
    signums: list[signal.Signals] = []
    for item in text.split(","):
        name = item.strip().upper()
        signum = getattr(signal, name if name.startswith("SIG") else f"SIG{name}", None)
        if not isinstance(signum, signal.Signals) or signum in (signal.SIGKILL, signal.SIGSTOP):
            raise Refusal(f"--signals-to-handle: signal {item.strip()!r} does not exist or can't be handled", EX_USAGE)
        signums.append(signum)
    return signums


# ---- signals to another launcher ----


def signal_launcher(run: RunRecord, signum: int) -> None:
    """Signal the launcher of a run. Raises Refusal unless it is certain that the pid is that launcher's."""
    pid, _, host = run.launcher
    run_id = escape(run.id)
    if not run.mine:
        raise Refusal(f"run {run_id} belongs to {run.user}, and only that user can stop it", EX_NOPERM)
    if host and host != os.uname().nodename:
        raise Refusal(f"run {run_id} runs on host {escape(host)}: run this command there", EX_UNAVAILABLE)
    launcher = find_process(pid)
    if launcher is not None and is_alive(run) is None:
        unknown = f"pid {pid} ({escape(launcher.name)}) does not show whether it is the launcher"
        raise Refusal(f"run {run_id}: {unknown}, so it is not signalled", EX_UNAVAILABLE)
    if signum == DETACH_SIGNAL and launcher is not None and is_alive(run) and not procfs.catches_signal(pid, signum):
        advice = "in its terminal: Ctrl-Z, then `bg` and `disown -h`"
        raise Refusal(f"run {run_id} was started by a Stoker that can't detach; {advice}", EX_UNAVAILABLE)
    if launcher is None or not send_signal(launcher, signum, lambda: is_alive(run) is True):
        raise Refusal(f"run {run_id}: its launcher (pid {pid}) is gone", EX_UNAVAILABLE)
