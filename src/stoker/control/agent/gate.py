"""The start-up gate: how many ranks may import and load their model at the same time. Pure: told what happens, says who
may start.

A rank that may not start yet is not spawned at all, so that a waiting rank costs nothing and programs without our shim
are gated too. The agent owns the slots: a flock would be inherited by forked workers and outlive a killed rank.
"""

from __future__ import annotations


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
