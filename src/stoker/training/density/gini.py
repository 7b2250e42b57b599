"""How evenly something is shared out: 0 is evenly. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence


def gini(shares: Sequence[float]) -> float:
    """0 where all are equal, (k - 1) / k where one of k has all."""
    ordered = sorted(shares)
    count, total = len(ordered), math.fsum(ordered)
    if not total or ordered[0] == ordered[-1]:
        return 0.0
    return math.fsum((2 * place - count - 1) * share for place, share in enumerate(ordered, 1)) / (count * total)


def evenness(shares: Sequence[float]) -> float:
    """The shares' entropy, divided by that of equal ones: 1 where all are equal, 0 where one has all."""
    total = math.fsum(shares)
    if len(shares) < 2 or not total:
        return 1.0
    return math.fsum(share / total * math.log(total / share) for share in shares if share) / math.log(len(shares))
