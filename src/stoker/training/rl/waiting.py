"""How a rank waits for the servers that write its completions: a stop ends the wait, the launcher hears what the rank waits
for, and a server that can't be reached is reported with the reason.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from stoker.contract.env_vars import WAITING_PHASE
from stoker.contract.text import escape
from stoker.contract.units import format_duration

FOR_SERVER, FOR_COMPLETIONS = f"{WAITING_PHASE}the server", f"{WAITING_PHASE}completions"
POLL_S = 0.1
STOP_S = 1.0  # completions that come this soon after a stop still end the step
ANNOUNCE_S = 2.0  # the launcher looks at a rank that has been silent for 3 s
RENEW_S = 20.0  # the launcher believes an announced wait for 60 s
REPORT_S = 2.0  # a server that is back sooner is not worth a line
PROGRESS_S = 30.0  # between two lines about the same wait
T = TypeVar("T")


class StopRequested(Exception):
    """This rank, or another one, was told to stop while it waited for a server."""


class _Outage:
    """A server that can't be used. `since`: when the first request failed; `next_line`: when the next line is due; `is_probed`:
    only a probe has noticed it.
    """

    def __init__(self, since: float) -> None:
        self.since, self.next_line, self.is_reported, self.is_probed = since, since + REPORT_S, False, True


class ServerWait:
    """`should_stop`: whether this rank was told to stop; `phase`: tells the launcher what the rank does; `report`: prints a
    line; None: another rank of this host does. `result` and `call` are for the main thread, `failed` and `answered` for any.
    """

    def __init__(
        self,
        should_stop: Callable[[], bool] = lambda: False,
        phase: Callable[[str], None] = lambda name: None,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self.should_stop, self._phase, self._report = should_stop, phase, report or (lambda line: None)
        self.reports = report is not None
        self._stop_seen: float | None = None
        self._recent_s = (0.0, 0.0)  # how long the two waits before took
        self._lock = threading.Lock()
        self._outages: dict[str, _Outage] = {}

    def call(self, request: Callable[[], T]) -> T:
        """Return what `request` returns, which runs in a thread of its own. Raises StopRequested."""
        future = Future[T]()

        def run() -> None:
            try:
                future.set_result(request())
            except BaseException as problem:
                future.set_exception(problem)

        threading.Thread(target=run, name="request", daemon=True).start()
        return self.result(future, FOR_SERVER)

    def result(self, future: Future[T], usual_phase: str = FOR_COMPLETIONS) -> T:
        """Return the future's result once it is there. Raises StopRequested if the rank is told to stop first."""
        began, usual_s = time.monotonic(), min(self._recent_s)
        announce_at = began + max(ANNOUNCE_S, 2 * usual_s)
        progress_at = began + max(PROGRESS_S, 2 * usual_s)
        announced = ""
        try:
            while not wait([future], POLL_S).done:
                now = time.monotonic()
                if self.should_stop():
                    self._stop_seen = self._stop_seen or now
                    if now - self._stop_seen > STOP_S:
                        raise StopRequested("stopped while it waited for a server")
                phase = FOR_SERVER if self._outages else usual_phase
                if now > announce_at or (self._outages and announced != phase):
                    self._phase(phase)
                    announced, announce_at = phase, now + RENEW_S
                if now > progress_at and not self._outages:
                    self._report(f"waiting for the servers' answers for {format_duration(now - began)}")
                    progress_at = now + PROGRESS_S
            return future.result()
        finally:
            took = time.monotonic() - began
            if took > POLL_S:
                self._recent_s = self._recent_s[1], took
            if announced:
                self._phase("train")

    def failed(self, address: str, since: float, problem: str, patience_s: float, is_probe: bool = False) -> None:
        """A request got no answer that can be used; the server has been so `since` then. It is asked for up to `patience_s`."""
        now = time.monotonic()
        with self._lock:
            outage = self._outages.setdefault(address, _Outage(since))
            outage.is_probed = outage.is_probed and is_probe
            if now < outage.next_line:
                return
            is_first, outage.is_reported, outage.next_line = not outage.is_reported, True, now + PROGRESS_S
        line = f"the server at {address} {escape(problem, 300)}"
        waited, limit = format_duration(now - outage.since), format_duration(patience_s)
        self._report(
            f"{line}; waiting for it, up to {limit}" if is_first else f"{line}; has waited {waited} of up to {limit}"
        )

    def answered(self, address: str, is_probe: bool = False) -> None:
        """A request got an answer; a probe, a connection, which ends what only probes have noticed."""
        if address not in self._outages:
            return
        with self._lock:
            outage = self._outages.get(address)
            if outage is None or (is_probe and not outage.is_probed):
                return
            del self._outages[address]
        if outage.is_reported:
            self._report(
                f"the server at {address} answers again, after {format_duration(time.monotonic() - outage.since)}"
            )
