"""What numbers a setting may be: declared beside it, `option(..., limit=limits.COUNT)`, and checked wherever it is read."""

from __future__ import annotations

import math

from stoker.contract.shape import shape


@shape
class Range:
    low: float
    high: float = math.inf
    above: bool = False  # low itself is out
    below: bool = False  # high itself is out

    def __contains__(self, value: object) -> bool:
        assert isinstance(value, (int, float)), f"a limit of {value!r}, which is no number"
        return (
            (self.low < value if self.above else self.low <= value)
            and (value < self.high if self.below else value <= self.high)
            and math.isfinite(value)
        )

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"above {self.low:g}" if self.above else f"from {self.low:g} up"
        return f"from {self.low:g} to {'below ' if self.below else ''}{self.high:g}"


MANY = 10**9  # no run has more of anything it counts; of tokens and samples a million times as many
COUNT, FROM_ONE, FROM_TWO = Range(0, MANY), Range(1, MANY), Range(2, MANY)
LARGE, SEED = Range(0, MANY * 10**6), Range(0, 2**63 - 1)
NOT_NEGATIVE, POSITIVE = Range(0), Range(0, above=True)
SHARE, LESS_THAN_ALL = Range(0, 1), Range(0, 1, below=True)
