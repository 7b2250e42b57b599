"""Memory of this host's ranks: the MEM lines' numbers, and the guard on resident memory.

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
