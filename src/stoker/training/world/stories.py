"""`story`: people go to places, take things and give them away; the answer is a word of the story."""

from __future__ import annotations

from typing import NamedTuple

from stoker.training.world.case import Asked, Case
from stoker.training.world.dice import Dice
from stoker.training.world.splits import pair_held
from stoker.training.world.world import World

MOVES = ("went", "walked", "ran", "came")
TAKES = ("took", "found", "got")
ENDS = ("Now", "At the end,", "So")
WHERE = Asked(
    (
        "Where is {p}?",
        "Where is {p} now?",
        "In which place is {p}?",
        "Which place is {p} in?",
        "Say where {p} is.",
        "Tell me where {p} is now.",
        "Can you say where {p} is?",
        "{p} is in which place?",
        "Where did {p} go?",
        "At the end, where is {p}?",
    ),
    ("Do you know where {p} is?", "What place is {p} in now?", "Please say where {p} is."),
)
WHO = Asked(
    (
        "Who has the {t}?",
        "Who has the {t} now?",
        "Say who has the {t}.",
        "Tell me who has the {t} now.",
        "Can you say who has the {t}?",
        "Who is it that has the {t}?",
        "Now who has the {t}?",
        "Please say who has the {t}.",
    ),
    ("Do you know who has the {t}?", "At the end, who has the {t}?"),
)
WHAT = Asked(
    (
        "What does {p} have?",
        "What does {p} have now?",
        "Say what {p} has.",
        "Tell me what {p} has now.",
        "Can you say what {p} has?",
        "What is it that {p} has?",
        "Which thing does {p} have?",
        "At the end, what does {p} have?",
    ),
    ("Do you know what {p} has?", "Please say what {p} has."),
)


class Story(NamedTuple):
    text: str
    people: list[str]
    where: dict[str, str]  # person -> place
    has: dict[str, str]  # thing -> person


def tell(w: World, dice: Dice, held: bool) -> Story:
    low, high = w.lexicon.sentences
    people = dice.some(w.names, 2 + dice.below(1 + 2 * w.level))
    where: dict[str, str] = {}
    holds: dict[str, str] = {}
    told: list[str] = []
    places, things = w.places[held], w.things[held]
    for at in range(low + dice.below(high - low + 1)):
        person, draw = dice.pick(people), dice.random()
        if at and dice.random() < 0.2:
            told.append("Then")
        carried = holds.get(person)
        if carried and draw < 0.4:
            other = dice.pick(people)
            if other not in holds and carried in things[other]:
                told.append(f"{person} gave the {carried} to {other}.")
                holds[other] = holds.pop(person)
                continue
        if carried is None and draw < 0.5 and at:
            thing = dice.pick(things[person])
            if thing not in holds.values():
                told.append(f"{person} {dice.pick(TAKES)} the {thing}.")
                holds[person] = thing
                continue
        place = dice.pick(places[person])
        while place == where.get(person):
            place = dice.pick(places[person])
        told.append(f"{person} {dice.pick(MOVES)} to the {place}.")
        where[person] = place
    return Story(" ".join(told), people, where, {thing: person for person, thing in holds.items()})


def case(w: World, dice: Dice, held: bool) -> Case:
    while True:
        story = tell(w, dice, held)
        if story.has and dice.random() < 0.6:
            thing, person = dice.pick(list(story.has.items()))
            if held and not pair_held(person, thing):
                continue
            return (
                _who(w, dice, held, story, thing, person)
                if dice.random() < 0.5
                else _what(w, dice, held, story, thing, person)
            )
        person, place = dice.pick(list(story.where.items()))
        if held and not pair_held(person, place):
            continue
        wrong = _other(dice, list(story.where.values()), w.places[held][person], place)
        prompt = f"{story.text} {WHERE.draw(dice, held).format(p=person)}"
        return Case(
            "story",
            prompt,
            place,
            f"{person} is in the {place}.",
            wrong,
            f"{person} is in the {wrong}.",
            among=w.lexicon.places,
        )


def _who(w: World, dice: Dice, held: bool, story: Story, thing: str, person: str) -> Case:
    wrong = _other(dice, story.people, [name for name in w.names if thing in w.things[held][name]], person)
    prompt = f"{story.text} {WHO.draw(dice, held).format(t=thing)}"
    return Case(
        "story", prompt, person, f"{person} has the {thing}.", wrong, f"{wrong} has the {thing}.", among=w.names
    )


def _what(w: World, dice: Dice, held: bool, story: Story, thing: str, person: str) -> Case:
    wrong = _other(dice, list(story.has), w.things[held][person], thing)
    prompt = f"{story.text} {WHAT.draw(dice, held).format(p=person)}"
    return Case(
        "story",
        prompt,
        thing,
        f"{person} has the {thing}.",
        wrong,
        f"{person} has the {wrong}.",
        among=w.lexicon.things,
    )


def _other(dice: Dice, near: list[str], allowed: list[str], right: str) -> str:
    """A wrong answer: one of the story's own words where that may stand in this file, or any."""
    found = dice.pick(near) if dice.random() < 0.7 else dice.pick(allowed)
    while found == right or found not in allowed:
        found = dice.pick(allowed)
    return found


def text(w: World, dice: Dice, held: bool) -> str:
    """A story, and often how it ended."""
    story = tell(w, dice, held)
    while (
        held
        and not any(pair_held(story.has[thing], thing) for thing in story.has)
        and not any(map(pair_held, story.where, story.where.values()))
    ):
        story = tell(w, dice, held)
    if dice.random() < 0.4:
        return story.text
    ends = [f"{person} is in the {place}." for person, place in story.where.items()] + [
        f"{person} has the {thing}." for thing, person in story.has.items()
    ]
    return " ".join([story.text, dice.pick(ENDS), *dice.some(ends, min(2, len(ends)))])
