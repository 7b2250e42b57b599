"""`sum`: one addition or subtraction, bare or told of somebody's pears."""

from __future__ import annotations

from functools import cache

from stoker.training.world.case import Asked, Case
from stoker.training.world.dice import Dice
from stoker.training.world.lexicon import VERBS
from stoker.training.world.world import Step, World

NOW = Asked(
    (
        "How many {i} does {p} have now?",
        "How many {i} does {p} have?",
        "Now how many {i} does {p} have?",
        "Say how many {i} {p} has now.",
        "How many {i} are there now?",
        "What number of {i} does {p} have?",
        "Can you say how many {i} {p} has?",
        "Count the {i} of {p}.",
        "{p} now has how many {i}?",
        "How many {i} has {p} now?",
        "Please say how many {i} {p} has.",
    ),
    (
        "Do you know how many {i} {p} has now?",
        "At the end, how many {i} does {p} have?",
        "What number of {i} has {p} now?",
    ),
)
TOGETHER = Asked(
    (
        "How many {i} do {p} and {q} have together?",
        "How many {i} are there together?",
        "Say how many {i} {p} and {q} have together.",
        "Together, how many {i} do {p} and {q} have?",
        "How many {i} have {p} and {q} together?",
        "Count the {i} of {p} and {q}.",
        "Do you know how many {i} {p} and {q} have together?",
    ),
    (
        "Please say how many {i} {p} and {q} have together.",
        "What number of {i} do {p} and {q} have together?",
        "Together {p} and {q} have how many {i}?",
    ),
)
BARE = Asked(
    (
        "What is {x}?",
        "How much is {x}?",
        "Say what {x} is.",
        "{x} is how much?",
        "Can you count {x}?",
        "What number is {x}?",
        "Do you know what {x} is?",
    ),
    ("Please say how much {x} is.", "Which number is {x}?", "Can you say what {x} is?"),
)


FINGERS = 6


def near(dice: Dice, right: int, most: int) -> int:
    """A number that is off by one, two or three."""
    while True:
        found = right + dice.pick((-3, -2, -1, 1, 2, 3))
        if 0 <= found <= most:
            return found


def case(w: World, dice: Dice, held: bool) -> Case:
    item, draw = dice.pick(w.items), dice.random()
    if draw < 0.3:
        step = a, sign, b, result = dice.pick(w.bare[held])
        sum_ = f"{a} {sign} {b}"
        prompt = BARE.draw(dice, held).format(x=sum_)
    elif draw < 0.45:
        step = a, sign, b, result = dice.pick(w.sums[held]["+"])
        p, q = dice.some(w.names, 2)
        prompt = f"{p} has {a} {item}. {q} has {b} {item}. " + TOGETHER.draw(dice, held).format(i=item, p=p, q=q)
    else:
        step = a, sign, b, result = dice.pick(w.sums[held][dice.pick("+-")])
        p = dice.pick(w.names)
        prompt = f"{begin(dice, p, a, item)} {go_on(dice, p, sign, b, item)} " + NOW.draw(dice, held).format(
            i=item, p=p
        )
    wrong = near(dice, result, w.most)
    return Case("sum", prompt, str(result), worked(step), str(wrong), worked((a, sign, b, wrong)))


def begin(dice: Dice, person: str, count: int, item: str) -> str:
    return f"{person} has {count} {item}." if dice.random() < 0.8 else f"There is {person} with {count} {item}."


def go_on(dice: Dice, person: str, sign: str, count: int, item: str) -> str:
    more = "more " if sign == "+" and dice.random() < 0.4 else ""
    then = "Then " if dice.random() < 0.25 else ""
    return f"{then}{person} {dice.pick(VERBS[sign])} {count} {more}{item}."


def text(w: World, dice: Dice, held: bool) -> str:
    """Number sentences: single sums, sums that grow by one, what somebody has, and counting."""
    draw = dice.random()
    if draw < 0.12 or held:
        return " ".join([equation(dice.pick(w.bare[held])) for _ in range(8)])
    if draw < 0.36:
        return " ".join([worked(dice.pick(w.bare[held])) for _ in range(4)])
    if draw < 0.46:
        return _row(w, dice)
    if draw < 0.52:
        return f"{_family(w, dice)} {_family(w, dice)}"
    if draw < 0.6:
        return _counting(w, dice)
    return " ".join([told(w, dice) for _ in range(3)])


@cache
def equation(step: Step) -> str:
    a, sign, b, result = step
    return f"{a} {sign} {b} = {result}."


@cache
def worked(step: Step) -> str:
    """Counted on the fingers, as far as there are some: `5 + 3: 1 6, 2 7, 3 8.` The last number is the result, right or
    wrong.
    """
    a, sign, b, result = step
    if not 0 < b <= FINGERS:
        return equation(step)
    way = [a + at if sign == "+" else a - at for at in range(1, b)] + [result]
    return f"{a} {sign} {b}: " + ", ".join([f"{at} {number}" for at, number in enumerate(way, 1)]) + "."


def told(w: World, dice: Dice) -> str:
    person, item = dice.pick(w.names), dice.pick(w.items)
    step = dice.pick(w.sums[False][dice.pick("+-")])
    a, sign, b, result = step
    verb = dice.pick(VERBS[sign])
    draw, middle = dice.random(), ""
    if draw < 0.5:
        middle = f"{worked(step)} "
    elif draw < 0.7:
        middle = f"{equation(step)} "
    if dice.random() < 0.5:
        more = f"{b} more" if sign == "+" else f"{b}"
        return f"{person} has {a} {item} and {verb} {more}. {middle}Now {person} has {result} {item}."
    return (
        f"{begin(dice, person, a, item)} {go_on(dice, person, sign, b, item)} {middle}Now {person} has {result} {item}."
    )


def _row(w: World, dice: Dice) -> str:
    """One number, and sums with it in order: how one sum follows from the one before."""
    start = dice.below(w.most + 1)
    sign = dice.pick("+-")
    steps = [one for one in w.rows[start] if one[1] == sign]
    at = dice.below(max(len(steps) - 7, 1))
    return " ".join([equation(one) for one in steps[at : at + 8]])


def _family(w: World, dice: Dice) -> str:
    """What belongs together: 3 + 4, 4 + 3, 7 - 3, 7 - 4; what is held out of it is missing."""
    a, _, b, c = dice.pick(w.sums[False]["+"])
    known: list[Step] = [(a, "+", b, c), (b, "+", a, c)]
    return " ".join(
        [equation(one) for one in (*known, *[one for one in w.rows[c] if one[1] == "-" and one[2] in (a, b)])]
    )


def _counting(w: World, dice: Dice) -> str:
    start = dice.below(w.most - 6)
    if dice.random() < 0.5:
        return " ".join([f"After {one} comes {one + 1}." for one in range(start, start + 6)])
    return " ".join([f"Before {one + 1} comes {one}." for one in range(start + 5, start - 1, -1)])
