"""How many samples of a step each rank computes, when that is planned anew, and when the network is to blame."""

from __future__ import annotations

import bisect
import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from stoker.contract.frozen import as_json, frozen
from stoker.contract.typed_values import read_fields, read_frozen


@frozen
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

    def go_on(self, told: Any) -> bool:
        """Whether a checkpoint's plans hold here: another number of ranks or another batch begins with equal shares.
        ValueError: they are no plans.
        """
        if told is None:
            return False
        kept = read_fields({"ranks": "Count", "batch": "Count", "plans": "list[Any]"}, told)
        if kept["ranks"] != self.ranks or kept["batch"] != self.batch:
            return False
        plans = [read_frozen(Plan, one) for one in kept["plans"]]
        least = 1 if self.batch >= self.ranks else 0
        for plan in plans:
            if len(plan.shares) != self.ranks or sum(plan.shares) != self.batch or min(plan.shares) < least:
                raise ValueError(f"{self.batch} samples of a step are shared by {self.ranks} ranks as {plan.shares}")
        if not plans or any(later.step < sooner.step for sooner, later in itertools.pairwise(plans)):
            raise ValueError("its plans of the ranks' shares are not in order")
        with self._lock:
            self._plans = [Plan(0, plans[0].shares), *plans[1:]]
        return plans[-1].shares != equal(self.batch, self.ranks)


IMBALANCE = 0.05  # the slowest rank takes this much longer than the mean of all
STEPS = 20  # that are looked at
LATE = 16  # of them with that imbalance: on a machine with other work a step now and then says the opposite
GAIN = 0.02  # below it another plan is not worth its new shapes: the numbers are whole, and some imbalance stays
NETWORK = 0.2  # share of a step that no rank can help
HELPS = (
    "comm: bf16 halves it, powersgd or local:8 nearly end it (`stoker docs balance`: what they do to the loss), and a larger"
    " batch pays it less often"
)


@frozen
class Proposal:
    shares: tuple[int, ...]
    seconds: tuple[float, ...]  # per sample, of each rank
    imbalance: float  # of the shares before
    gain: float  # steps/s of compute alone, as predicted: 0.5 is half as many again


class Rule:
    """Hears the compute seconds of every step, the same on all ranks, and proposes other shares when imbalance stays."""

    def __init__(self, samples: int, most: Sequence[int] | None = None) -> None:
        self._samples, self._most = samples, most
        self._seen: deque[tuple[tuple[int, ...], tuple[float, ...]]] = deque(maxlen=STEPS)

    def hear(self, shares: Sequence[int], seconds: Sequence[float]) -> Proposal | None:
        """`shares` are those the seconds were measured with. A step nobody measured (0 seconds) says nothing."""
        if min(seconds) <= 0 or min(shares) <= 0:
            return None
        if self._seen and self._seen[-1][0] != tuple(shares):
            self._seen.clear()  # another plan came into force
        self._seen.append((tuple(shares), tuple(seconds)))
        if len(self._seen) < STEPS or sum(imbalance(one) > IMBALANCE for _, one in self._seen) < LATE:
            return None
        # Medians over the steps: where each step has another slowest rank (noise), they are near each other and nothing
        # is gained.
        per_sample = tuple(median(one[n] for _, one in self._seen) / shares[n] for n in range(len(shares)))
        self._seen.clear()
        now = [part * one for part, one in zip(shares, per_sample, strict=True)]
        better = apportion(self._samples, [1 / one for one in per_sample], self._most)
        then = max(part * one for part, one in zip(better, per_sample, strict=True))
        gain = max(now) / then - 1
        return Proposal(better, per_sample, imbalance(now), gain) if gain > GAIN and better != tuple(shares) else None


def imbalance(seconds: Sequence[float]) -> float:
    """How much longer the slowest takes than the mean: what equal speeds would gain."""
    return max(seconds) * len(seconds) / sum(seconds) - 1


@frozen
class Network:
    share: float  # of a step
    waiting: float  # seconds a step that even the slowest rank waits
    step: float  # seconds


class NetworkRule:
    """What even the rank that is done last waits for is not another rank: it is the exchange."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float, float]] = deque(maxlen=STEPS)
        self._said = False

    def hear(self, compute: Sequence[float], waiting: Sequence[float]) -> Network | None:
        """Once a run: when, over 20 steps, the exchange takes a fifth of a step and more than unlike ranks cost."""
        if self._said or min(compute) <= 0:
            return None
        unlike = max(compute) - sum(compute) / len(compute)
        step = max(one + two for one, two in zip(compute, waiting, strict=True))
        self._seen.append((min(waiting), unlike, step))
        if len(self._seen) < STEPS:
            return None
        exchange, unlike, step = (median(one[n] for one in self._seen) for n in range(3))
        if exchange < NETWORK * step or exchange <= unlike:
            return None
        self._said = True
        return Network(exchange / step, exchange, step)


class Balancer:
    """Hears every step's seconds, the same on all ranks, and acts: another plan, a word about the network. `plans`: None
    where shares stay equal. `ahead`: steps that may be cut already. `lag`: how many steps old the seconds are. `tell`:
    writes down that a step decided on a plan.
    """

    def __init__(
        self,
        batch: int,
        ranks: int,
        plans: Plans | None,
        *,
        ahead: int,
        lag: int,
        comm: str,
        say: Callable[[str], None],
        tell: Callable[[int, Plan, float], None],
    ) -> None:
        self._plans, self._equal = plans, Plans(batch, ranks)
        self._rule, self._network = Rule(batch), NetworkRule()
        self._batch, self._ahead, self._lag, self._comm, self._say, self._tell = batch, ahead, lag, comm, say, tell
        self._advised = False

    def hear(self, step: int, samples: int, compute: Sequence[float], waiting: Sequence[float]) -> None:
        """`samples` of this step: an epoch's last, smaller one measures nothing."""
        measured = step - self._lag
        if measured < 0 or samples != self._batch or not compute:
            return
        found = self._rule.hear((self._plans or self._equal).at(measured).shares, compute)
        if found is not None:
            self._act(step, found)
        network = self._network.hear(compute, waiting)
        if network is not None:
            self._say(
                f"the network is the limit, not the ranks: {network.share:.0%} of a step ({network.waiting:.3f} of"
                f" {network.step:.3f} s) is the exchange of"
                f" gradients{'' if self._comm == 'full' else f', with comm {self._comm}'}. What helps: {HELPS}"
            )

    def _act(self, step: int, found: Proposal) -> None:
        speeds = ", ".join(f"{1 / one:.1f}" for one in found.seconds)
        if self._plans is None:
            if not self._advised:
                self._advised = True
                self._say(
                    f"ranks of different speed ({speeds} samples/s): --balance auto would compute {1 + found.gain:.2f} times as"
                    " fast"
                )
            return
        plan = Plan(step + self._ahead, found.shares)
        self._plans.add(plan)
        self._say(
            f"balance: from step {plan.step} on the ranks take {', '.join(map(str, plan.shares))} of {self._batch}"
            f" samples ({speeds} samples/s; the slowest took {found.imbalance:.0%} longer than the mean)"
        )
        self._tell(step, plan, found.imbalance)
