"""The stop ladder of one host: SIGCONT, the signal to each rank alone, grace, SIGTERM to its group, SIGKILL.

Ranks first and their groups later: a SIGTERM to a whole group kills the data-loader workers first and turns a clean save
into an error. A rank that has just reported an exception is on its way out and is not disturbed for a moment, so that its
own exit code survives.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field

from stoker.control.agent import kernel
from stoker.control.agent.spawn import Rank
from stoker.control.agent.sweep import Sweeper

ON_ITS_WAY_S = 2.0
GROUP_S = 1.0


@dataclass
class StopLadder:
    ranks: dict[int, Rank]
    sweeper: Sweeper
    signum: int
    grace: float
    at_once: set[int] = field(default_factory=set)  # ranks that get no grace
    begun: float = field(default_factory=time.monotonic)
    _asked: set[int] = field(default_factory=set)
    _group_asked: float = 0.0

    def living(self) -> list[Rank]:
        return [rank for rank in self.ranks.values() if rank.ended is None]

    def hurry(self) -> None:
        self.grace = 0.0
        self._group_asked = self._group_asked or time.monotonic() - GROUP_S

    def step(self) -> None:
        """Called until nothing lives. Does what is due and returns at once."""
        now = time.monotonic()
        for rank in self.living():
            if rank.rank in self.at_once:
                self._send(rank, signal.SIGKILL)
            elif rank.pid not in self._asked and not (rank.reported and now - rank.reported < ON_ITS_WAY_S and self.grace > 0):
                self._asked.add(rank.pid)
                kernel.send(rank.me, signal.SIGCONT)
                self._send(rank, self.signum)
        if now - self.begun < self.grace or not self.living():
            return
        if not self._group_asked:
            self._group_asked = now
            self.sweeper.signal_all(signal.SIGTERM, self.sweeper.leftovers())
        if now - self._group_asked >= GROUP_S:
            for rank in self.living():
                rank.signalled = True
            self.sweeper.signal_all(signal.SIGKILL, self.sweeper.leftovers())

    @staticmethod
    def _send(rank: Rank, signum: int) -> None:
        rank.signalled = True
        kernel.send(rank.me, signum)
