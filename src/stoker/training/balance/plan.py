"""How many samples of a step each rank computes. Pure: measured seconds in, whole numbers out.

A step's samples are the same whatever the plan says; it only cuts them. A plan is in force from a step that all ranks
know, and is kept with the checkpoint, so what a rank computes is a function of (seed, step, plan).
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.contract.shape import as_json, shape


@shape
class Plan:
    """In force from `step` on: `shares` are the samples of each rank in a whole batch."""

    step: int
    shares: tuple[int, ...]

    def of(self, samples: int) -> tuple[int, ...]:
        """The shares of a step that may have fewer samples than a whole batch: an epoch's last."""
        return self.shares if samples == sum(self.shares) else apportion(samples, self.shares)


def apportion(samples: int, weights: Sequence[float], most: Sequence[int] | None = None) -> tuple[int, ...]:
    """Whole numbers that add up to `samples`, in proportion to the weights. `most`: what each can take at all.

    Each gets one at least where there are enough: a rank without samples would still have to take part in the exchange.
    """
    count = len(weights)
    limits = [min(samples, one) for one in most] if most is not None else [samples] * count
    if sum(limits) < samples:
        raise ValueError(f"{samples} samples don't fit: the ranks can take {' + '.join(map(str, limits))}")
    found = [1 if samples >= count and limits[n] else 0 for n in range(count)]
    whole = sum(weights)
    ideal = [samples * one / whole for one in weights]
    for _ in range(samples - sum(found)):
        # The next one goes where it is missed most, relative to what that rank should have: the slowest part of a step
        # decides, not a sum.
        free = [n for n in range(count) if found[n] < limits[n]]
        found[min(free, key=lambda n: ((found[n] + 1) / ideal[n], n))] += 1
    return tuple(found)


def equal(samples: int, ranks: int) -> tuple[int, ...]:
    base, more = divmod(samples, ranks)
    return tuple(base + (rank < more) for rank in range(ranks))


class Plans:
    """The plans of a run, in the order they came into force. The thread that prepares batches asks, the loop adds."""

    def __init__(self, batch: int, ranks: int, shares: tuple[int, ...] | None = None) -> None:
        """`shares`: to begin with, where they can't be equal."""
        self.batch, self.ranks = batch, ranks
        self._lock = threading.Lock()
        self._plans = [Plan(0, shares or equal(batch, ranks))]
        self._cut = -1  # the last step whose samples have been cut

    def cut(self, step: int) -> Plan:
        """The plan a step's samples are cut by: from now on no other can come into force there."""
        with self._lock:
            self._cut = max(self._cut, step)
            return self._at(step)

    @property
    def last_cut(self) -> int:
        with self._lock:
            return self._cut

    def at(self, step: int) -> Plan:
        with self._lock:
            return self._at(step)

    def _at(self, step: int) -> Plan:
        return self._plans[bisect.bisect_right(self._plans, step, key=lambda plan: plan.step) - 1]

    def add(self, plan: Plan) -> None:
        with self._lock:
            assert plan.step > self._cut, f"a plan for step {plan.step}, and step {self._cut} has been cut"
            self._plans.append(plan)

    def told(self, step: int) -> dict[str, Any]:
        """What a checkpoint of `step` keeps: the plan in force, and one that is decided but not in force yet."""
        with self._lock:
            kept = [one for one in self._plans if one.step > step]
            return {
                "ranks": self.ranks,
                "batch": self.batch,
                "plans": [as_json(one) for one in (self._at(step), *kept)],
            }

    def go_on(self, told: Mapping[str, Any] | None) -> bool:
        """Whether a checkpoint's plans hold here: another number of ranks or another batch begins with equal shares."""
        if told is None or told.get("ranks") != self.ranks or told.get("batch") != self.batch:
            return False
        with self._lock:
            self._plans = [Plan(int(one["step"]), tuple(map(int, one["shares"]))) for one in told["plans"]]
            self._plans[0] = Plan(0, self._plans[0].shares)
        return self._plans[-1].shares != equal(self.batch, self.ranks)
