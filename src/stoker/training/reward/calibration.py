"""Whether a probability means what it says: pairs are put in bins by σ(margin) of the likelier answer, and counted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

BINS = 10


def calibration(margins: Sequence[float], bins: int = BINS) -> list[dict[str, Any]]:
    """From one half to one: how sure the model was, and how often it was right then."""
    counted = [[0, 0.0, 0.0] for _ in range(bins)]
    for margin in margins:
        sure = 1 / (1 + math.exp(-abs(margin))) if abs(margin) < 700 else 1.0
        one = counted[min(int((sure - 0.5) * 2 * bins), bins - 1)]
        one[0] += 1
        one[1] += sure
        one[2] += 0.5 if margin == 0 else margin > 0  # no order at all: a coin's
    return [
        {
            "low": 0.5 + place / (2 * bins),
            "high": 0.5 + (place + 1) / (2 * bins),
            "predicted": total / count,
            "observed": right / count,
            "count": count,
        }
        for place, (count, total, right) in enumerate(counted)
        if count
    ]
