"""Which contents are held out: by a hash of the content alone, so that it is the same in every file, seed and size."""

from __future__ import annotations

from functools import cache

from stoker.training.world.dice import digest

PERCENT = 15


def _drawn(*content: object) -> bool:
    return digest("held out", *content) % 100 < PERCENT


@cache
def pair_held(person: str, noun: str) -> bool:
    """A person with a place, a thing or a dish: never in one sentence of a training file."""
    return _drawn("pair", person, noun)


def fact_held(thing: str, quality: str) -> bool:
    """A fact that is stated in the base text, like all, but that nobody asks about."""
    return _drawn("fact", thing, quality)


@cache
def sum_held(a: int, sign: str, b: int) -> bool:
    """A sum whose result is written nowhere. 3 + 4 and 4 + 3 are one; what has a 0 or a 1 in it is how numbers are
    counted, and stays.
    """
    result = a + b if sign == "+" else a - b
    if min(a, b, result) < 2:
        return False
    return _drawn("sum", *sorted((a, b)) if sign == "+" else (a, b), sign)


def chain_held(start: int, *changes: int) -> bool:
    """A problem of several steps, or one that begins so: 8, +3, -4. Its single sums may be known."""
    return any(_chain_drawn(start, *changes[:count]) for count in range(2, len(changes) + 1))


@cache
def _chain_drawn(*numbers: int) -> bool:
    return _drawn("chain", *numbers)


@cache
def order_held(a: int, b: int) -> bool:
    """Two numbers that are nowhere compared. Neighbours stay: they are how numbers are counted."""
    low, high = sorted((a, b))
    return low >= 2 and high - low >= 2 and _drawn("order", low, high)
