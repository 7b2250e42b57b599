"""The lexicon with what follows from it, worked out once: who may be where in a training file, which sums there are.

Which contents are held out follows from a hash of the content alone: it is the same in every file, seed and size.
"""

from __future__ import annotations

from functools import cache

from stoker.training.world.dice import digest
from stoker.training.world.lexicon import Lexicon, lexicon

PERCENT = 15
Step = tuple[int, str, int, int]  # a, sign, b, result


class World:
    def __init__(self, level: int) -> None:
        lex = self.lexicon = lexicon(level)
        self.level = level
        self.names = lex.names
        self.items = lex.items
        self.most = lex.most
        # By `held`: what a training file may use, and what a held-out file may.
        self.places = _allowed(lex, lex.places)
        self.things = _allowed(lex, lex.things)
        self.dishes = _allowed(lex, lex.dishes)
        self.facts_of = {
            key: [one for one in lex.facts if key in (one.thing, one.quality)]
            for one in lex.facts
            for key in (one.thing, one.quality)
        }
        self.facts = {
            held: [one for one in lex.facts if fact_held(one.thing, one.quality) == held] for held in (False, True)
        }
        self.values = {
            fact.quality: sorted({one.value for one in lex.facts if one.quality == fact.quality}) for fact in lex.facts
        }
        steps = [(a, "+", b, a + b) for a in range(lex.most + 1) for b in range(min(lex.most - a, lex.reach) + 1)]
        steps += [(a, "-", b, a - b) for a in range(lex.most + 1) for b in range(min(a, lex.reach) + 1)]
        self.bare = {held: [one for one in steps if sum_held(*one[:3]) == held] for held in (False, True)}
        # "1 pears" is no English, and nobody loses 0: in what is told of people every number is 2 or more.
        told = [one for one in steps if min(one[0], one[2], one[3]) >= 2]
        self.sums = {
            held: {sign: [one for one in told if one[1] == sign and sum_held(*one[:3]) == held] for sign in "+-"}
            for held in (False, True)
        }
        self.onward = {held: _by_start(told, held) for held in (False, True)}
        self.rows = _by_start(steps, False)


def _allowed(lex: Lexicon, nouns: list[str]) -> dict[bool, dict[str, list[str]]]:
    return {
        held: {name: [noun for noun in nouns if held or not pair_held(name, noun)] for name in lex.names}
        for held in (False, True)
    }


def _by_start(steps: list[Step], held: bool) -> dict[int, list[Step]]:
    found: dict[int, list[Step]] = {}
    for one in steps:
        if held or not sum_held(*one[:3]):
            found.setdefault(one[0], []).append(one)
    return found


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
