"""The lexicon with what follows from it, worked out once: who may be where in a training file, which sums there are.

Which contents are held out follows from a hash of the content alone: it is the same in every file, seed and size.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from typing import Any, NamedTuple, TypeVar

from stoker.contract.frozen import frozen

T = TypeVar("T")


def digest(*content: object) -> int:
    """A number from 0 to 2^32 that hangs on the words alone, not on the process."""
    return int.from_bytes(blake2b("\x1f".join(map(str, content)).encode(), digest_size=4).digest())


class Dice:
    def __init__(self, *key: object) -> None:
        self.random = random.Random(digest(*key)).random

    def below(self, count: int) -> int:
        return int(self.random() * count)

    def pick(self, among: Sequence[T]) -> T:
        return among[int(self.random() * len(among))]

    def some(self, among: Sequence[T], count: int) -> list[T]:
        """Different ones, in the order drawn. `count` is small beside what there is."""
        found: list[T] = []
        while len(found) < count:
            one = among[int(self.random() * len(among))]
            if one not in found:
                found.append(one)
        return found


def _words(line: str) -> list[str]:
    return line.split()


NAMES = _words(
    "Anna Ben Clara David Emma Felix Grace Henry Iris Jack Kate Leo Maria Noah Olga Paul Rosa Sam Tina Tom Uma Victor"
    " Wendy Max Adam Bella Carl Dora Eric Fiona George Hanna Igor Julia Karl Lena Martin Nina Oscar Petra Ralph Sara"
    " Tony Ursula Vera Walter Yara Zoe Alan Bruno Celia Daniel Edith Frank Gina Hugo Ida Jonas Kira Lucas Mona Nils"
    " Olive Peter Quinn Robert Sofia Theo Ulla Viola Will Xenia Agnes Boris Chloe Dennis Elsa Fred Greta Harry Irma"
    " James Klara Louis Marta Nora Otto Pia Rita Simon Tessa Urs Vivian Wanda Yusuf Zara Arthur Betty Colin Diana Edgar"
    " Flora Gloria Hector Ingrid Joel Laura Mark Nadia Owen Polly Ruben Stella Tara Ugo Vincent Wilma Yvonne Zack Amy"
)
PLACES = _words(
    "garden kitchen barn park school shop forest house field tower cave village "
    "library market castle station harbour office museum cellar valley church stable bakery "
    "meadow temple theatre hotel factory desert attic courtyard jungle prison palace cabin mill workshop chapel canyon"
)
COLOURS = _words("red blue green yellow brown black white grey pink orange purple silver")
MATERIALS = _words("wood glass iron wool paper clay stone silk gold leather tin wax")
ITEMS = _words("pears apples eggs plums nuts coins cards stones shells beads pens stamps roses keys buttons marbles")
DISHES = _words(
    "tea milk juice soup bread cheese honey fish rice corn jam cake pasta salad butter yoghurt coffee cocoa beans stew "
    "pizza toast pudding porridge curry pie cream syrup lentils noodles"
)
VERBS = {"+": ("gets", "finds", "buys", "wins"), "-": ("loses", "sells", "drops", "hides")}

_ANIMALS = """cow brown barn grass moo, dog black house meat woof, cat grey kitchen fish meow, horse white field hay neigh, duck yellow park bread quack,
sheep white village leaves baa, pig pink barn corn oink, hen red garden seeds cluck, owl brown forest worms hoot, frog green cave flies croak,
bee yellow garden honey buzz, mouse grey tower cheese squeak"""
_MORE_ANIMALS = _words(
    "goat fox wolf bear lion tiger crow swan goose donkey snake monkey rabbit turtle camel zebra parrot eagle deer"
    " hamster seal whale otter lizard panda koala moose badger beaver falcon gecko heron jackal lemur llama lynx mole"
    " newt ostrich panther"
)
_THINGS = """ball red park wool, book blue school paper, cup white kitchen glass, hat black shop wool, bell grey tower iron, lamp yellow house glass,
box brown barn wood, rope green forest wool, drum red village wood, kite blue field paper, spoon grey kitchen iron, coat green shop wool"""
_MORE_THINGS = _words(
    "clock mirror chair table basket ladder hammer whistle flute guitar blanket pillow candle bucket shovel wheel tent"
    " flag ring crown vase statue puzzle doll sword shield mask brush needle wallet bottle kettle pan broom towel"
    " helmet anchor compass trumpet violin"
)


class Fact(NamedTuple):
    thing: str
    quality: str  # colour, home, food, sound, material
    value: str


@frozen
class Lexicon:
    level: int
    names: list[str]
    places: list[str]
    things: list[str]
    animals: list[str]
    items: list[str]
    dishes: list[str]
    facts: list[Fact]
    most: int  # no number is above it
    reach: int  # nor is what is added or taken away above this
    steps: tuple[int, int]  # of a problem, from and to
    sentences: tuple[int, int]  # of a story


def lexicon(level: int) -> Lexicon:
    """Level 0 is for half a million parameters; each level has more of everything, as far as there are words."""

    def first(words: list[str], *counts: int) -> list[str]:
        return words[: counts[level] if level < len(counts) else len(words)]

    places = first(PLACES, 12, 24)
    animals, more_animals = _told(_ANIMALS)[: 8 if level == 0 else None], first(_MORE_ANIMALS, 0, 12)
    things, more_things = _told(_THINGS)[: 8 if level == 0 else None], first(_MORE_THINGS, 0, 12)
    foods, sounds = [told[3] for told in animals], [told[4] for told in animals]
    for name in more_animals:
        animals.append([name, *(_one_of(name, among) for among in (COLOURS, places, foods, sounds))])
    for name in more_things:
        things.append([name, *(_one_of(name, among) for among in (COLOURS, places, MATERIALS))])
    facts = [
        Fact(told[0], quality, value)
        for told in animals
        for quality, value in zip(("colour", "home", "food", "sound"), told[1:], strict=True)
    ]
    facts += [
        Fact(told[0], quality, value)
        for told in things
        for quality, value in zip(("colour", "home", "material"), told[1:], strict=True)
    ]
    return Lexicon(
        level=level,
        names=first(NAMES, 16, 60),
        places=places,
        things=[told[0] for told in things],
        animals=[told[0] for told in animals],
        items=first(ITEMS, 8, 12),
        dishes=first(DISHES, 8, 20),
        facts=facts,
        most=(20, 50, 100, 200)[min(level, 3)],
        reach=(6, 20, 100, 200)[min(level, 3)],
        steps=(2, 2 + level),
        sentences=(2 + 2 * level, 4 + 3 * level),
    )


def _told(lines: str) -> list[list[str]]:
    return [one.split() for one in lines.split(",")]


def _one_of(name: str, among: list[str]) -> str:
    return among[digest("fact", name, len(among)) % len(among)]


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
    """A sum whose result is written nowhere. 3 + 4 and 4 + 3 are one; those with a 0 or a 1 stay, for counting."""
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


Messages = list[dict[str, str]]
LEADS = ("", "", "", "", "Tell me: ", "Please answer: ", "Think first: ", "Next question: ")
WORKED = 0.5  # how many of the many-step answers show their steps


class Case(NamedTuple):  # a tuple: twenty thousand a second are made, and a frozen dataclass takes ten times as long
    kind: str
    prompt: str
    answer: str
    said: str  # the answer as a sentence
    wrong: str
    wrong_said: str
    work: str = ""  # the steps, where there are several
    wrong_work: str = ""
    before: tuple[tuple[str, str], ...] = ()  # earlier turns of the conversation: role, content
    among: Sequence[str] = ()  # the words that such an answer is one of: names, colours; empty for numbers


class Asked(NamedTuple):
    """Wordings of one question, the ones to learn from and the ones held out."""

    learned: tuple[str, ...]
    held: tuple[str, ...]

    def draw(self, dice: Dice, held: bool) -> str:
        return dice.pick(LEADS) + dice.pick(self.held if held else self.learned)


def wordings(learned: str, held: str) -> Asked:
    """Each sentence is a wording."""
    return Asked(*(tuple(re.split(r"(?<=[.?]) ", text)) for text in (learned, held)))


def said_so(kind: str, prompt: str, answer: str, wrong: str, sentence: str, **more: Any) -> Case:
    """`sentence`: the wording of the answer, with {} in its place."""
    return Case(kind, prompt, answer, sentence.format(answer), wrong, sentence.format(wrong), **more)


def strict(case: Case, dice: Dice, right: bool = True) -> str:
    """A sentence, or the steps of half the many-step answers, then the answer where a marker finds it."""
    if case.kind == "steps":
        steps = case.work if right else case.wrong_work
        first = steps if dice.random() < WORKED else ""
    else:
        first = case.said if right else case.wrong_said
    end = f"The answer is {case.answer if right else case.wrong}."
    return f"{first} {end}" if first else end


def loose(case: Case, dice: Dice, bare: float) -> str:
    """As people answer: the bare word, a sentence, or the steps before it."""
    if dice.random() < bare:
        return f"{case.answer[0].upper()}{case.answer[1:]}."
    return f"{case.work} {case.said}" if case.work and dice.random() < 0.5 else case.said


def asked(case: Case) -> Messages:
    """The conversation up to the answer."""
    return [{"role": role, "content": content} for role, content in (*case.before, ("user", case.prompt))]


def prompt_of(case: Case) -> str | Messages:
    """Plain text where there is nothing before the question."""
    return asked(case) if case.before else case.prompt
