"""Ranges and choices of options: `limits.COUNT("help", 0)`, `choice("a", "b")("help")`, `text_option("PATH")("help")`.

A value is checked wherever an option is read: as a flag, in a file and in the environment.
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
    exclude_low: bool = False
    exclude_high: bool = False

    def __call__(self, help: str, default: float, **settings: Any) -> Any:
        """Return an option that takes a number in this range."""
        return option(help, default=default, limit=self, **settings)

    def __contains__(self, value: object) -> bool:
        assert isinstance(value, (int, float)), f"can't compare {value!r} with a range: it is not a number"
        try:
            number = float(value)
        except OverflowError:  # an int of 309 digits or more
            return False
        return (
            (self.low < value if self.exclude_low else self.low <= value)
            and (value < self.high if self.exclude_high else value <= self.high)
            and math.isfinite(number)
        )

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"above {self.low:g}" if self.exclude_low else f"at least {self.low:g}"
        return f"from {self.low:g} to {'below ' if self.exclude_high else ''}{self.high:g}"


MAX_COUNT = 10**9  # the limit of anything that a run counts; tokens and samples may be a million times as many
COUNT, FROM_ONE, FROM_TWO = Range(0, MAX_COUNT), Range(1, MAX_COUNT), Range(2, MAX_COUNT)
LARGE, SEED = Range(0, MAX_COUNT * 10**6), Range(0, 2**63 - 1)
NOT_NEGATIVE, POSITIVE = Range(0), Range(0, exclude_low=True)
FRACTION, FRACTION_BELOW_ONE = Range(0, 1), Range(0, 1, exclude_high=True)


def choice(*choices: str) -> Callable[[str], Any]:
    """Return a function that makes an option with these choices. The first one is the default."""
    return lambda help: option(help, default=choices[0], choices=choices)


def text_option(metavar: str) -> Callable[[str], Any]:
    """Return a function that makes an option for text, with "" as its default."""
    return lambda help: option(help, metavar, default="")
