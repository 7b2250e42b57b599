"""Whether the time that a tokenizer's patterns take is bounded. A regex engine can't be stopped once it has begun: a
stranger's pattern that tries every way at every character would hold the process for hours, Ctrl-C or not.

Bounded are alternatives of single characters and classes with repeats side by side, as all published tokenizers have
them: no repeat around a group, at most two open ends and few ways in an alternative, no large counts, and looks ahead or
back at one character only. What such a pattern takes grows with the text without a jump, so a try on its beginning shows
whether it is slow.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator
from typing import Any

from stoker.contract.shape import shape

OPEN_ENDS = 2  # of one alternative: \s*[\r\n]+ has two, and takes the square of a run of blanks at worst
MOST_WAYS = 64  # of one alternative, besides its open ends: \p{N}{1,3} has three, an optional character two
LARGEST_COUNT = 100
LONGEST, MOST_ALTERNATIVES, MOST_COUNTED = 4000, 100, 1000  # of a whole pattern: engines copy what is counted
_PROPERTY = re.compile(r"(\\\\)|\\[pP](?:\{\^?\w{1,60}\}|\w)|\\[hR]")
_parser: Any = __import__("re._parser", fromlist=["parse"]) if hasattr(re, "_parser") else __import__("sre_parse")


@shape
class Cost:
    ends: int = 0
    ways: int = 1
    least: int = 0  # characters that must be there before anything is tried


ENDLESS = Cost(OPEN_ENDS + 1, MOST_WAYS + 1, 0)


def unbounded(splitter: dict[str, Any]) -> str:
    """The first pattern of a pre-tokenizer whose time is not bounded; empty: there is none."""
    return next((pattern for pattern in _patterns(splitter) if not is_bounded(pattern)), "")


def _patterns(splitter: Any) -> Iterator[str]:
    if isinstance(splitter, dict):
        for key, value in splitter.items():
            if key == "Regex" and isinstance(value, str):
                yield value
            yield from _patterns(value)
    elif isinstance(splitter, list):
        for value in splitter:
            yield from _patterns(value)


def is_bounded(pattern: str) -> bool:
    plain = _PROPERTY.sub(lambda match: match[1] or r"\w", pattern)
    # }+ and }? are possessive and lazy for some engines, and a repeat around a repeat for others.
    if len(pattern) > LONGEST or "}+" in plain or "}?" in plain:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a set within a set means something else to Python than to the others
            tree = _parser.parse(plain)
    except (re.error, ValueError, OverflowError, RecursionError, Warning):
        return False
    costs = [_cost(branch) for branch in _branches(tree)]
    if len(costs) > MOST_ALTERNATIVES or sum(cost.least + cost.ways for cost in costs) > MOST_COUNTED:
        return False
    return all(cost.ends <= OPEN_ENDS and cost.ways <= MOST_WAYS and cost.least <= LARGEST_COUNT for cost in costs)


def _branches(tree: Any) -> list[Any]:
    """The alternatives of a pattern, also where they share their beginning."""
    items = list(tree)
    if len(items) == 1 and str(items[0][0]) == "BRANCH":
        return [branch for part in items[0][1][1] for branch in _branches(part)]
    if len(items) == 1 and str(items[0][0]) == "SUBPATTERN":
        return _branches(items[0][1][-1])
    return [items]


def _cost(items: Any) -> Cost:
    """Of a sequence: open ends and characters add up, ways multiply."""
    costs = [_cost_of(str(name), value) for name, value in items]
    ways = min(math.prod(cost.ways for cost in costs), MOST_WAYS + 1)
    return Cost(sum(cost.ends for cost in costs), ways, sum(cost.least for cost in costs))


def _cost_of(name: str, value: Any) -> Cost:
    if name in _ONE_CHARACTER or name == "AT":
        return Cost(least=name != "AT")
    if name == "BRANCH":
        parts = [_cost(part) for part in value[1]]
        most = [max(getattr(part, name) for part in parts) for name in ("ends", "least")]
        return Cost(most[0], sum(part.ways for part in parts), most[1])
    if name in ("SUBPATTERN", "ATOMIC_GROUP"):
        return _cost(value[-1] if name == "SUBPATTERN" else value)
    if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        return _cost_of_repeat(*value)
    if name in ("ASSERT", "ASSERT_NOT"):
        return Cost() if _is_one_character(value[1]) else ENDLESS
    return ENDLESS  # a reference to a group, a condition


def _cost_of_repeat(least: int, most: int, item: Any) -> Cost:
    if most == 1:
        inner = _cost(item)
        return Cost(inner.ends, inner.ways + 1 - least, inner.least)
    if not _is_one_character(item) or least > LARGEST_COUNT:
        return ENDLESS
    if most == _parser.MAXREPEAT:
        return Cost(ends=1, least=least)
    return Cost(ways=most - least + 1, least=least) if most <= LARGEST_COUNT else ENDLESS


_ONE_CHARACTER = ("LITERAL", "NOT_LITERAL", "IN", "ANY", "CATEGORY", "RANGE")


def _is_one_character(item: Any) -> bool:
    items = list(item)
    if len(items) != 1:
        return False
    name, value = str(items[0][0]), items[0][1]
    if name == "SUBPATTERN":
        return _is_one_character(value[-1])
    return name in _ONE_CHARACTER
