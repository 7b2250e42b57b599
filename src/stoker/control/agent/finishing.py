"""The end of an attempt on this host: what the ranks left behind gets its own grace, then goes; then the GPUs' memory
is back.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping

from stoker.control.agent.relay import Relay
from stoker.control.agent.spawn import Rank
from stoker.control.agent.sweep import Sweeper, reap
from stoker.control.machine.nvml import Nvml

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
