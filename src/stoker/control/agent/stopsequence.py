"""The stop ladder of one host: SIGCONT, the signal to each rank alone, grace, SIGTERM to its group, SIGKILL.

Ranks first and their groups later: a SIGTERM to a whole group kills the data-loader workers first and turns a clean
save into an error. A rank that has just reported an exception is on its way out and is not disturbed for a moment, so
that its own exit code survives.
"""

from __future__ import annotations

import signal
import time

from stoker.contract.process import send
from stoker.control.agent.spawn import Rank
from stoker.control.agent.sweep import Sweeper
from stoker.control.machine import processes

ON_ITS_WAY_S = 2.0
GROUP_S = 1.0


class StopLadder:
    def __init__(self, ranks: dict[int, Rank], sweeper: Sweeper, signum: int, grace: float, at_once: set[int]) -> None:
        self._ranks = ranks
        self._sweeper = sweeper
        self._signum = signum
        self._grace = grace
        self._at_once = at_once  # ranks that get no grace
        self._begun = time.monotonic()
        self._asked: set[int] = set()
        self._group_asked = 0.0

    def living(self) -> list[Rank]:
        return [rank for rank in self._ranks.values() if rank.ended is None]

    def hurry(self) -> None:
        self._grace = 0.0
        self._group_asked = self._group_asked or time.monotonic() - GROUP_S

    def step(self) -> None:
        """Called until nothing lives. Does what is due and returns at once."""
        now = time.monotonic()
        for rank in self.living():
            if rank.rank in self._at_once:
                self._send(rank, signal.SIGKILL)
            elif rank.pid not in self._asked and not (
                rank.reported and now - rank.reported < ON_ITS_WAY_S and self._grace > 0
            ):
                self._asked.add(rank.pid)
                send(rank.me, signal.SIGCONT)
                self._send(rank, self._signum)
        if now - self._begun < self._grace or not self.living():
            return
        if not self._group_asked:
            self._group_asked = now
            self._sweeper.signal_all(signal.SIGTERM, self._sweeper.leftovers())
        if now - self._group_asked >= GROUP_S:
            for rank in self.living():
                rank.signalled = True
            self._sweeper.signal_all(signal.SIGKILL, self._sweeper.leftovers())

    @staticmethod
    def _send(rank: Rank, signum: int) -> None:
        rank.signalled = True
        if (
            signum != signal.SIGKILL
            and not processes.catches(rank.pid, signum)
            and processes.catches(rank.pid, signal.SIGTERM)
        ):
            signum = signal.SIGTERM  # what scripts save on: a closed terminal must not cost more than a stop
        send(rank.me, signum)
