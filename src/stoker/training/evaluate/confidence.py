"""How sure a measured number is. Pure, no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

Z95 = 1.959963984540054  # a normal variable lies within ± this 95 times in 100


class Interval(NamedTuple):
    low: float
    high: float


def wilson(right: float, total: float, z: float = Z95) -> Interval:
    """Of a share. Unlike ± z·√(p(1-p)/n) it is no point where all or none were right, and it stays within 0 and 1."""
    if total <= 0:
        return Interval(0.0, 1.0)
    p = right / total
    square = z * z / total
    middle = (p + square / 2) / (1 + square)
    half = z / (1 + square) * math.sqrt(p * (1 - p) / total + square / (4 * total))
    return Interval(0.0 if right <= 0 else max(middle - half, 0.0), 1.0 if right >= total else min(middle + half, 1.0))


def wilson_of_draws(right: Sequence[int], draws: int, z: float = Z95) -> Interval:
    """Answers to one question are not independent: as many count as would vary as much as the questions' shares."""
    count = len(right)
    if not count or not draws:
        return Interval(0.0, 1.0)
    shares = [one / draws for one in right]
    p = sum(shares) / count
    effective = float(count)
    if count > 1 and 0 < p < 1:
        variance = sum((share - p) ** 2 for share in shares) / (count - 1) / count
        effective = min(max(p * (1 - p) / variance, count), count * draws) if variance else float(count * draws)
    return wilson(p * effective, effective, z)


def around(value: float, error: float, z: float = Z95) -> Interval:
    return Interval(value - z * error, value + z * error)


def p_value(difference: float, error: float) -> float:
    """Two-sided: how often a difference this large would come without a cause."""
    if error == 0:
        return 1.0 if difference == 0 else 0.0
    return math.erfc(abs(difference) / error / math.sqrt(2))


def holm(p_values: Sequence[float], level: float = 0.05) -> list[bool]:
    """Which of several differences stand, so that all together are wrong at most `level` of the time (Holm 1979)."""
    stands = [False] * len(p_values)
    for place, which in enumerate(sorted(range(len(p_values)), key=lambda one: p_values[one])):
        if p_values[which] > level / (len(p_values) - place):
            break
        stands[which] = True
    return stands
