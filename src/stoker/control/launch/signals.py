"""The signals that reach the launcher: caught at any moment, acted on where the run can."""

from __future__ import annotations

import signal
from collections.abc import Callable

from stoker.contract.names import DETACH_SIGNAL, EX_USAGE, STOP_NOW_SIGNAL, Refusal
from stoker.control.launch.options import RunOptions

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # the signals that stop a run


class Interrupted(Exception):
    """A signal came before anything was started."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class Signals:
    """`tell`: records an event, once there is a record."""

    def __init__(self, options: RunOptions, say: Callable[[str], None], tell: Callable[..., None]) -> None:
        self._options = options
        self._say = say
        self._tell = tell
        self._pending: list[int] = []
        self._stays_after_hangup = options.on_hangup == "detach"

    def catch(self) -> None:
        """Those of --signals-to-handle, and always the four that stop a run: unhandled, one would end the launcher and
        take the ranks' chance to save.
        """
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
        """The oldest that the run must act on; 0: none. `stoker detach` and the hangup of a run that outlives its
        terminal change nothing for the ranks.
        """
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
