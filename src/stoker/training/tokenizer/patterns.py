"""Whether the time that a tokenizer's patterns take is bounded. A regex engine can't be stopped once it has begun: a
stranger's pattern that tries every way at every character would hold the process for hours, Ctrl-C or not.

Bounded are alternatives of single characters and classes with repeats side by side, as all published tokenizers have
them: no repeat around a group, at most two open ends in an alternative, and looks ahead or back at one character only.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

OPEN_ENDS = 2  # of one alternative: \s*[\r\n]+ has two, and takes the square of a run of blanks at worst
FEW = 3  # a repeat up to this often is no open end: \p{N}{1,3}
_PROPERTY = re.compile(r"\\[pP](?:\{[^}]{0,60}\}|\w)|\\[hR]")
_parser: Any = __import__("re._parser", fromlist=["parse"]) if hasattr(re, "_parser") else __import__("sre_parse")


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
    if len(pattern) > 20_000:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a set within a set means something else to Python than to the others
            tree = _parser.parse(_PROPERTY.sub(r"\\w", pattern))
    except (re.error, ValueError, OverflowError, RecursionError, Warning):
        return False
    return all(_ends(branch) <= OPEN_ENDS for branch in _branches(tree))


def _branches(tree: Any) -> list[Any]:
    """The alternatives of a pattern, also where they share their beginning."""
    items = list(tree)
    if len(items) == 1 and str(items[0][0]) == "BRANCH":
        return [branch for part in items[0][1][1] for branch in _branches(part)]
    if len(items) == 1 and str(items[0][0]) == "SUBPATTERN":
        return _branches(items[0][1][-1])
    return [items]


def _ends(items: Any) -> int:
    """Open ends of a sequence; more than OPEN_ENDS where something in it has no bound."""
    return sum(_ends_of(str(name), value) for name, value in items)


def _ends_of(name: str, value: Any) -> int:
    if name in _ONE_CHARACTER or name == "AT":
        return 0
    if name == "BRANCH":
        return max((_ends(part) for part in value[1]), default=0)
    if name in ("SUBPATTERN", "ATOMIC_GROUP"):
        return _ends(value[-1] if name == "SUBPATTERN" else value)
    if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        _, most, item = value
        if most == 1:
            return _ends(item)
        return (most > FEW) if _is_one_character(item) else OPEN_ENDS + 1
    if name in ("ASSERT", "ASSERT_NOT"):
        return 0 if _is_one_character(value[1]) else OPEN_ENDS + 1
    return OPEN_ENDS + 1  # a reference to a group, a condition


_ONE_CHARACTER = ("LITERAL", "NOT_LITERAL", "IN", "ANY", "CATEGORY", "RANGE")


def _is_one_character(item: Any) -> bool:
    items = list(item)
    if len(items) != 1:
        return False
    name, value = str(items[0][0]), items[0][1]
    if name == "SUBPATTERN":
        return _is_one_character(value[-1])
    return name in _ONE_CHARACTER
