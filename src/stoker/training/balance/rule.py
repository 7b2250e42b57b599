"""When the shares are planned anew, and when the network is to blame rather than a rank. Pure: numbers of steps in, a
decision out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from stoker.contract.shape import shape
from stoker.training.balance.plan import apportion

IMBALANCE = 0.05  # the slowest rank takes this much longer than the mean of all
STEPS = 20  # that are looked at
LATE = 16  # of them with that imbalance: on a machine with other work a step now and then says the opposite
GAIN = 0.02  # below it another plan is not worth its new shapes: the numbers are whole, and some imbalance stays
NETWORK = 0.2  # share of a step that no rank can help


@shape
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


@shape
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
        exchange = min(waiting)
        self._seen.append(
            (
                exchange,
                max(compute) - sum(compute) / len(compute),
                max(one + two for one, two in zip(compute, waiting, strict=True)),
            )
        )
        if len(self._seen) < STEPS:
            return None
        exchange, unlike, step = (median(one[n] for one in self._seen) for n in range(3))
        if exchange < NETWORK * step or exchange <= unlike:
            return None
        self._said = True
        return Network(exchange / step, exchange, step)
