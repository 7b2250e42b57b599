"""Memory of this host's ranks: the MEM lines' numbers, the guard on resident memory, and the start gate.

Resident memory, never RLIMIT_AS: that limits address space, which a CUDA context alone fills with tens of gigabytes.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from stoker.contract.process import send
from stoker.control.agent.spawn import Rank
from stoker.control.machine import host, processes
from stoker.control.machine.nvml import Nvml


def memory_now(pid: int, gpu: str | None, nvml: Nvml | None) -> dict[str, Any]:
    total, available, _ = host.memory()
    card = nvml.memory(gpu) if nvml is not None and gpu else None
    return {
        "rss": processes.resident(pid),
        "host_used": total - available,
        "host_total": total,
        "gpu": list(card) if card else None,
    }


class MemoryWatch:
    def __init__(self, limit: int) -> None:
        self.limit = limit

    def check(self, ranks: dict[int, Rank], say: Callable[[dict[str, Any]], None]) -> None:
        if not self.limit:
            return
        for rank in ranks.values():
            if rank.ended is not None or rank.over:
                continue
            family = [rank.pid, *children(rank.pid)]
            if sum(processes.resident(pid) or 0 for pid in family) <= self.limit:
                continue
            # Forked workers share pages with the rank: the sum counts those twice. Only PSS, which is slow to read, is
            # exact.
            taken = sum(_proportional(pid) for pid in family)
            if taken > self.limit:
                rank.over = taken
                rank.signalled = True
                send(rank.me, signal.SIGSTOP)  # no further growth while the coordinator hears of it
                say({"is": "ram", "rank": rank.rank, "bytes": taken, "limit": self.limit})


def children(pid: int) -> list[int]:
    """Its children, and theirs."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
            direct = [int(child) for child in file.read().split()]
    except OSError:
        return []
    return direct + [grandchild for child in direct for grandchild in children(child)]


def _proportional(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            for line in file:
                if line.startswith("Pss:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # gone, or a kernel without it: resident memory is the next best
    return processes.resident(pid) or 0


# ---- the start gate: how many ranks may import and load their model at the same time. Pure ----
#
# A rank that may not start yet is not spawned at all, so that a waiting rank costs nothing and programs without our shim
# are gated too. The agent owns the slots: a flock would be inherited by forked workers and outlive a killed rank.


class Gate:
    def __init__(self, ranks: tuple[int, ...], slots: int, slot_s: float, total_s: float, started: float) -> None:
        self.ranks = ranks
        self.slots = slots  # 0: find out from what the first rank takes
        self._slot_s = slot_s  # a slot is given back after this long at the latest
        self._total_s = (
            total_s  # and after this long everybody goes: the first ranks wait in the store, which has a timeout too
        )
        self._started = started
        self.waiting = list(ranks)
        self.holding: dict[int, float] = {}  # rank -> deadline

    @property
    def limited(self) -> bool:
        """Does this gate hold anybody back? If not, nobody needs to hear of it."""
        return self.slots == 0 or self.slots < len(self.ranks)

    def admit(self, now: float) -> list[int]:
        """The ranks that may start now; they hold a slot from here on."""
        allowed = max(1, self.slots)
        if now - self._started > self._total_s:
            allowed = len(self.ranks)
        admitted = []
        while self.waiting and len(self.holding) < allowed:
            rank = self.waiting.pop(0)
            self.holding[rank] = now + self._slot_s
            admitted.append(rank)
        return admitted

    def release(self, rank: int) -> bool:
        return self.holding.pop(rank, None) is not None

    def overdue(self, now: float) -> list[int]:
        return [rank for rank, deadline in self.holding.items() if now >= deadline]

    def measured(self, took: int, available: int) -> None:
        """The first rank is through and took this much memory at its peak: how many more fit side by side?"""
        if self.slots == 0:
            self.slots = max(1, min(len(self.ranks), available // max(took, 1)))
