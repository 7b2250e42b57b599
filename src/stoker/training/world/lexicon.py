"""The words of the world: who and what there is at each level, and what is always true of it."""

from __future__ import annotations

from typing import NamedTuple

from stoker.contract.shape import shape
from stoker.training.world.dice import digest


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


@shape
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
    """Level 0 is for a model of half a million parameters; each level has more of everything, as far as there are
    words.
    """

    def first(words: list[str], *counts: int) -> list[str]:
        return words[: counts[level] if level < len(counts) else len(words)]

    places = first(PLACES, 12, 24)
    animals, more_animals = _told(_ANIMALS)[: 8 if level == 0 else None], first(_MORE_ANIMALS, 0, 12)
    things, more_things = _told(_THINGS)[: 8 if level == 0 else None], first(_MORE_THINGS, 0, 12)
    foods, sounds = [told[3] for told in animals], [told[4] for told in animals]
    for name in more_animals:
        animals.append([name, *(_drawn(name, among) for among in (COLOURS, places, foods, sounds))])
    for name in more_things:
        things.append([name, *(_drawn(name, among) for among in (COLOURS, places, MATERIALS))])
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


def _drawn(name: str, among: list[str]) -> str:
    return among[digest("fact", name, len(among)) % len(among)]
