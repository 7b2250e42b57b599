"""`fact`: what is always true in this world, said in many ways. Base text states every fact; some are asked about only
in held-out questions.
"""

from __future__ import annotations

from functools import cache
from zlib import crc32

from stoker.training.world.case import LEADS, Case, wordings
from stoker.training.world.dice import Dice
from stoker.training.world.lexicon import Fact
from stoker.training.world.world import World

HELD_EVERY = 20
STATED = {
    "colour": (
        "The {t} is {v}.",
        "The colour of the {t} is {v}.",
        "Every {t} is {v}.",
        "The {t} has the colour {v}.",
        "You see a {t}. It is {v}.",
    ),
    "home": (
        "The {t} lives in the {v}.",
        "The home of the {t} is the {v}.",
        "Every {t} lives in the {v}.",
        "The {t} has a home in the {v}.",
    ),
    "food": ("The {t} eats {v}.", "The food of the {t} is {v}.", "Every {t} eats {v}.", "The {t} has {v} as food."),
    "sound": ("The {t} says {v}.", "The sound of the {t} is {v}.", "Every {t} says {v}.", "The {t} has the sound {v}."),
    "material": (
        "The {t} is made of {v}.",
        "The material of the {t} is {v}.",
        "Every {t} is made of {v}.",
        "The {t} has {v} as material.",
    ),
}
THING_HOME = (
    "The {t} belongs in the {v}.",
    "The home of the {t} is the {v}.",
    "Every {t} belongs in the {v}.",
    "The {t} has a home in the {v}.",
)
ANY = wordings(
    "What is the {k} of the {t}? Say the {k} of the {t}. Tell me the {k} of the {t}. Which {k} has the {t}?"
    " What {k} does the {t} have? Can you say the {k} of the {t}? The {k} of the {t} is what?"
    " Do you know the {k} of the {t}?",
    "Which {k} does the {t} have? Please say the {k} of the {t}. Say which {k} the {t} has.",
)
OWN = {
    "colour": wordings("What colour is the {t}? Say what colour the {t} is.", "Which colour is the {t}?"),
    "home": wordings("Where does the {t} live? Say where the {t} lives.", "Do you know where the {t} lives?"),
    "food": wordings("What does the {t} eat? Say what the {t} eats.", "Do you know what the {t} eats?"),
    "sound": wordings("What does the {t} say? Which sound is from the {t}?", "Do you know what the {t} says?"),
    "material": wordings(
        "What is the {t} made of? Say what the {t} is made of.",
        "Do you know what the {t} is made of?",
    ),
}
THING_OWN = wordings("Where does the {t} belong? Say where the {t} belongs.", "Do you know where the {t} belongs?")


@cache
def _statements(fact: Fact, thing: bool) -> tuple[str, ...]:
    forms = THING_HOME if thing and fact.quality == "home" else STATED[fact.quality]
    return tuple(one.format(t=fact.thing, v=fact.value) for one in forms)


@cache
def _questions(fact: Fact, thing: bool, held: bool) -> tuple[str, ...]:
    own = THING_OWN if thing and fact.quality == "home" else OWN[fact.quality]
    return tuple(
        one.format(t=fact.thing, k=fact.quality)
        for one in ((*ANY.held, *own.held) if held else (*ANY.learned, *own.learned))
    )


def case(w: World, dice: Dice, held: bool) -> Case:
    fact = dice.pick(w.facts[held])
    thing = fact.thing in w.lexicon.things
    wrong = fact.value
    while wrong == fact.value:
        wrong = dice.pick(w.values[fact.quality])
    said = _statements(fact, thing)[0]
    prompt = dice.pick(LEADS) + dice.pick(_questions(fact, thing, held))
    return Case("fact", prompt, fact.value, said, wrong, said.replace(fact.value, wrong), among=w.values[fact.quality])


def text(w: World, dice: Dice, held: bool) -> str:
    """Every fact is stated in training files: it must be known before it is asked. So these texts are split by their
    whole wording.
    """
    while True:
        found = _mixture(w, dice)
        if (crc32(found.encode()) % HELD_EVERY == 0) == held:
            return found


def _mixture(w: World, dice: Dice) -> str:
    """All about one thing, or one quality of several, or both mixed."""
    every, draw = w.lexicon.facts, dice.random()
    if draw < 0.4:
        told = w.facts_of[dice.pick(every).thing] * 2
    elif draw < 0.6:
        told = dice.some(w.facts_of[dice.pick(every).quality], 6)
    else:
        told = dice.some(every, 6)
    return " ".join([dice.pick(_statements(one, one.thing in w.lexicon.things)) for one in told])
