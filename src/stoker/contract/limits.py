"""What a setting may be: `limits.COUNT("help", 0)`, `one_of("a", "b")("help")`, `text("PATH")("help")`; checked wherever
it is read.
"""

from __future__ import annotations

import math

from stoker.contract.frozen import frozen, option

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


@frozen
class Range:
    low: float
    high: float = math.inf
    above: bool = False  # low itself is out
    below: bool = False  # high itself is out

    def __call__(self, help: str, default: float, **more: Any) -> Any:
        """A setting that is such a number."""
        return option(help, default=default, limit=self, **more)

    def __contains__(self, value: object) -> bool:
        assert isinstance(value, (int, float)), f"a limit of {value!r}, which is not a number"
        try:
            number = float(value)
        except OverflowError:  # an int of 309 digits or more
            return False
        return (
            (self.low < value if self.above else self.low <= value)
            and (value < self.high if self.below else value <= self.high)
            and math.isfinite(number)
        )

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"above {self.low:g}" if self.above else f"from {self.low:g} up"
        return f"from {self.low:g} to {'below ' if self.below else ''}{self.high:g}"


MAX_COUNT = 10**9  # no run has more of anything it counts; of tokens and samples a million times as many
COUNT, FROM_ONE, FROM_TWO = Range(0, MAX_COUNT), Range(1, MAX_COUNT), Range(2, MAX_COUNT)
LARGE, SEED = Range(0, MAX_COUNT * 10**6), Range(0, 2**63 - 1)
NOT_NEGATIVE, POSITIVE = Range(0), Range(0, above=True)
FRACTION, FRACTION_BELOW_ONE = Range(0, 1), Range(0, 1, below=True)


def choice(*choices: str) -> Callable[[str], Any]:
    """The first is the default."""
    return lambda help: option(help, default=choices[0], choices=choices)


def text_option(metavar: str) -> Callable[[str], Any]:
    return lambda help: option(help, metavar, default="")
