"""The background loop of `stoker metrics`: a snapshot every few seconds, made into the page that scrapes get.

NVML is asked here and never in a scrape: a driver that hangs leaves the last page, whose timestamp grows old.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable

from stoker.contract.names import MACHINE, Refusal
from stoker.control.doctor import check
from stoker.control.machine.examine import look_aside
from stoker.control.machine.facts import KNOWN, Examination
from stoker.control.machine.host import quick_host
from stoker.control.machine.observe import read_recorded
from stoker.control.show.metrics.page import Collected, Examined, render
from stoker.control.show.snapshot import Snapshot

EXAMINE_S = 300.0
_LOOK_S = 3.0  # that the driver has to answer the doctor
_LEVELS = ("fail", "warn", "unknown")


class Collector:
    """`gather` makes a snapshot. `say`: told of a problem, once."""

    def __init__(self, gather: Callable[[], Snapshot], root: str, dcgm: str, say: Callable[[str], None]) -> None:
        self._gather, self._root, self._dcgm, self._say = gather, root, dcgm, say
        self.page: bytes | None = None
        self._snapshot = Snapshot(time=0.0)
        self._collected = Collected(False, 0.0, 0.0)
        self._examined: Examined | None = None
        self._problem = ""
        self._over = threading.Event()

    def start(self, every_s: float) -> None:
        for work, pause in ((self.collect, every_s), (self.examine, EXAMINE_S)):
            threading.Thread(target=self._repeat, args=(work, pause), daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def _repeat(self, work: Callable[[], None], pause: float) -> None:
        while True:
            began = time.monotonic()
            work()
            if self._over.wait(max(pause - (time.monotonic() - began), pause / 10)):
                return

    def collect(self) -> None:
        began = time.monotonic()
        try:
            self._snapshot = self._gather()
            self._collected = Collected(True, self._snapshot.time, time.monotonic() - began)
            self._problem = ""
        except Exception as problem:  # what is served gets older, and says so; the next collection may succeed
            told = problem.line if isinstance(problem, Refusal) else f"{type(problem).__name__}: {problem}"
            if told != self._problem:
                self._problem = told
                self._say(f"stoker metrics: no snapshot: {told}")
            self._collected = Collected(False, self._collected.time, time.monotonic() - began)
        self.page = render(self._snapshot, self._collected, self._examined, self._dcgm)

    def examine(self) -> None:
        """The doctor's fast checks. The driver is asked by a child: one that hangs costs 3 s here and nothing more."""
        recorded = os.environ.get(MACHINE)
        try:
            machine = read_recorded(recorded) if recorded else look_aside(_LOOK_S)
        except (Refusal, OSError) as problem:
            machine = problem.line if isinstance(problem, Refusal) else str(problem)
        fast = [one for one in check.load().values() if one.fast]
        counts = Counter({(one.id, level): 0 for one in fast for level in _LEVELS})
        if isinstance(machine, str):
            counts.update((one.id, "unknown") for one in fast)
            name = os.uname().nodename
        else:
            environment = {name: os.environ[name] for name in KNOWN if name in os.environ}
            found = Examination(machine, host=quick_host(self._root), environment=environment)
            counts.update((finding.id, finding.level) for finding in check.run(fast, found))
            name = machine.hostname
        self._examined = Examined(name, time.time(), dict(counts))
