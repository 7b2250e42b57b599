"""How ranks end on one host. The stop sequence: SIGCONT, the signal to each rank alone, grace, SIGTERM to its group, SIGKILL.

Ranks first and their groups later: a SIGTERM to a whole group kills the data-loader workers first and turns a clean
save into an error. A rank that has just reported an exception is on its way out and is not disturbed for a moment, so
that its own exit code survives.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping

from stoker.contract.process import send
from stoker.control.agent.relay import Relay
from stoker.control.agent.spawn import Rank
from stoker.control.agent.sweep import Sweeper, reap
from stoker.control.machine import processes
from stoker.control.machine.nvml import Nvml

ON_ITS_WAY_S = 2.0
GROUP_S = 1.0


class StopSequence:
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


# ---- after the ranks: what they left behind gets its own grace, then goes; then the GPUs' memory is back ----

ASKED_S = 1.0
GPUS_S = 2.0


class Finishing:
    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._begun = time.monotonic()
        self._asked = 0.0
        self._named: list[str] = []
        self._said = False

    def step(
        self, sweeper: Sweeper, relay: Relay, ranks: Mapping[int, Rank], nvml: Nvml | None, collect: Callable[[], None]
    ) -> bool:
        """Called until it is True: all is swept, and told. `collect`: notes how ranks ended, while they are still our
        zombies.
        """
        now = time.monotonic()
        reap(sweeper.groups)
        left = sweeper.leftovers()
        if left and not self._asked:
            if now - self._begun < self._grace:
                if not self._said and now - self._begun > 1.0:
                    self._said = True
                    relay.say(
                        {
                            "is": "helpers",
                            "names": [f"pid {one.pid} ({one.name})" for one in left],
                            "seconds": self._grace,
                        }
                    )
                return False
            self._asked = now
            self._named = [f"pid {one.pid} ({one.name})" for one in left]
            sweeper.signal_all(signal.SIGTERM, left)
            return False
        if left and now - self._asked < ASKED_S:
            return False
        stuck = sweeper.kill()
        collect()
        sweeper.groups.clear()
        reap()
        for handle in list(relay.streams):
            relay.read_all(handle)
            if handle in relay.streams:
                relay.forget(handle)
        relay.say(
            {
                "is": "finished",
                "stopped": self._named,
                "gpus_held": _wait_for_gpus(ranks, nvml),
                "stuck": [{"pid": one.pid, "name": one.name, "state": one.state} for one in stuck],
            }
        )
        return True


def _wait_for_gpus(ranks: Mapping[int, Rank], nvml: Nvml | None) -> list[str]:
    """Until NVML has our processes off the cards; 2 s at most. On an H200 it takes 0.15 s."""
    if nvml is None:
        return []
    ours = {rank.pid for rank in ranks.values()}
    cards = {rank.gpu for rank in ranks.values() if rank.gpu}
    deadline = time.monotonic() + GPUS_S
    while True:
        busy = [card for card in cards if nvml.pids(card) & ours]
        if not busy or time.monotonic() > deadline:
            return busy
        time.sleep(0.02)
