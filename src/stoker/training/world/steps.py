"""`steps`: problems where each result is the next sum's beginning. Their answers come with the steps or without."""

from __future__ import annotations

from stoker.training.world.arithmetic import NOW, begin, equation, go_on, near, worked
from stoker.training.world.case import Asked, Case
from stoker.training.world.dice import Dice
from stoker.training.world.splits import chain_held, sum_held
from stoker.training.world.world import Step, World

CHAIN = Asked(
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
NEW_SUMS = 1 / 3  # of the held-out problems have a sum in them that is held out; the others are new as a whole


def chain(w: World, dice: Dice, held: bool) -> list[Step]:
    """Sums that follow from each other; held out, either one of them is written in no training file, or they are
    nowhere together.
    """
    low, high = w.lexicon.steps
    count = low + dice.below(high - low + 1)
    new_sum = held and dice.random() < NEW_SUMS
    onward = w.onward[new_sum]
    while True:
        found: list[Step] = []
        number = 2 + dice.below(w.most - 1)
        while len(found) < count and number in onward:
            step = dice.pick(onward[number])
            found.append(step)
            number = step[3]
        if len(found) < count:
            continue
        if any(sum_held(a, sign, b) for a, sign, b, _ in found) if new_sum else _new(found) == held:
            return found


def _new(steps: list[Step]) -> bool:
    return chain_held(steps[0][0], *[b if sign == "+" else -b for _, sign, b, _ in steps])


def case(w: World, dice: Dice, held: bool) -> Case:
    steps = chain(w, dice, held)
    start, result = steps[0][0], steps[-1][3]
    if dice.random() < 0.25:
        prompt = CHAIN.draw(dice, held).format(x=f"{start}" + "".join([f" {sign} {b}" for _, sign, b, _ in steps]))
        said = f"It is {result}."
        wrong = near(dice, result, w.most)
        wrong_said = f"It is {wrong}."
    else:
        person, item = dice.pick(w.names), dice.pick(w.items)
        prompt = f"{problem(dice, person, item, steps)} {NOW.draw(dice, held).format(i=item, p=person)}"
        said = f"{person} has {result} {item}."
        wrong = near(dice, result, w.most)
        wrong_said = f"{person} has {wrong} {item}."
    work = " ".join(map(worked, steps))
    a, sign, b, _ = steps[-1]
    return Case(
        "steps",
        prompt,
        str(result),
        said,
        str(wrong),
        wrong_said,
        work,
        " ".join([*map(worked, steps[:-1]), worked((a, sign, b, wrong))]),
    )


def problem(dice: Dice, person: str, item: str, steps: list[Step]) -> str:
    return " ".join(
        [begin(dice, person, steps[0][0], item), *[go_on(dice, person, sign, b, item) for _, sign, b, _ in steps]]
    )


def text(w: World, dice: Dice, held: bool) -> str:
    steps = chain(w, dice, held)
    if dice.random() < 0.3:
        return " ".join([" ".join(map(equation, one)) for one in (steps, chain(w, dice, held), chain(w, dice, held))])
    person, item = dice.pick(w.names), dice.pick(w.items)
    if dice.random() < 0.4:
        end = " ".join(map(worked, steps)) + " "
        return f"{problem(dice, person, item, steps)} {end}Now {person} has {steps[-1][3]} {item}."
    told = [begin(dice, person, steps[0][0], item)]
    for step in steps:
        told += [go_on(dice, person, step[1], step[2], item), worked(step)]
    return " ".join(told) + f" Now {person} has {steps[-1][3]} {item}."
