"""Bytes in use, by what they are for, while the allocations of a step are gone through one by one."""

from __future__ import annotations

from collections.abc import Mapping

# What memory is for, in the order in which it is shown.
WEIGHTS, ADAPTERS, GRADIENTS, OPTIMIZER = "weights", "adapters", "gradients", "optimizer"
ACTIVATIONS, WORK, LOSS, BUFFERS = "activations", "work", "loss", "buffers"
REFERENCE, SCORER, COPY, CACHE, GRAPHS = "reference", "reward model", "answering copy", "cache", "graphs"
GATHERED = "gathered"
COMMUNICATION, CONTEXT, MARGIN = "communication", "context", "margin"
TERMS = (
    WEIGHTS, ADAPTERS, GRADIENTS, OPTIMIZER, GATHERED, REFERENCE, SCORER, COPY, CACHE, GRAPHS, ACTIVATIONS, WORK, LOSS, BUFFERS,
    COMMUNICATION, CONTEXT, MARGIN,
)  # fmt: skip
GRAIN = 512  # bytes: CUDA's allocator rounds each tensor up to it

Held = tuple[str, int]  # what for, bytes


def rounded(size: int) -> int:
    return -(-size // GRAIN) * GRAIN


class Memory:
    def __init__(self, start: Mapping[str, int] | None = None) -> None:
        self.now = dict(start or {})
        self.total = self.peak = sum(self.now.values())
        self.at_peak = dict(self.now)

    def take(self, term: str, size: int) -> Held:
        size = rounded(size)
        self.now[term] = self.now.get(term, 0) + size
        self.total += size
        if self.total > self.peak:
            self.peak, self.at_peak = self.total, dict(self.now)
        return term, size

    def give(self, *held: Held | None) -> None:
        for one in held:
            if one is not None:
                self.now[one[0]] -= one[1]
                self.total -= one[1]


def added(one: Mapping[str, int], other: Mapping[str, int], times: int = 1) -> dict[str, int]:
    return {term: one.get(term, 0) + times * other.get(term, 0) for term in {**one, **other}}
