"""What is asked about numbers. `sum`: one addition or subtraction, bare or told of somebody's pears. `steps`: problems where each result is the next
sum's beginning; their answers come with the steps or without. `order`: which number is more, who has less, three numbers
from small to large.
"""

from __future__ import annotations

from functools import cache

from stoker.training.world.world import (
    VERBS,
    Case,
    Dice,
    Step,
    World,
    chain_held,
    order_held,
    said_so,
    sum_held,
    wordings,
)

NOW = wordings(
    "How many {i} does {p} have now? How many {i} does {p} have? Now how many {i} does {p} have?"
    " Say how many {i} {p} has now. How many {i} are there now? What number of {i} does {p} have?"
    " Can you say how many {i} {p} has? Count the {i} of {p}. {p} now has how many {i}? How many {i} has {p} now?"
    " Please say how many {i} {p} has.",
    "Do you know how many {i} {p} has now? At the end, how many {i} does {p} have? What number of {i} has {p} now?",
)
TOGETHER = wordings(
    "How many {i} do {p} and {q} have together? How many {i} are there together?"
    " Say how many {i} {p} and {q} have together. Together, how many {i} do {p} and {q} have?"
    " How many {i} have {p} and {q} together? Count the {i} of {p} and {q}."
    " Do you know how many {i} {p} and {q} have together?",
    "Please say how many {i} {p} and {q} have together. What number of {i} do {p} and {q} have together?"
    " Together {p} and {q} have how many {i}?",
)
BARE = wordings(
    "What is {x}? How much is {x}? Say what {x} is. {x} is how much? Can you count {x}? What number is {x}?"
    " Do you know what {x} is?",
    "Please say how much {x} is. Which number is {x}? Can you say what {x} is?",
)
WHICH = wordings(
    "Which is {m}, {a} or {b}? Which number is {m}, {a} or {b}? What is {m}, {a} or {b}?"
    " Say which is {m}, {a} or {b}. Of {a} or {b}, which is {m}? {a} or {b}: which is {m}?"
    " Can you say which is {m}, {a} or {b}? Is {a} or {b} {m}? Please say which is {m}, {a} or {b}.",
    "Do you know which is {m}, {a} or {b}? What number is {m}, {a} or {b}? Of {a} or {b}, what is {m}?",
)
WHO = wordings(
    "Who has {m} {i}? Say who has {m} {i}. Who has {m} {i} now? Can you say who has {m} {i}?"
    " Who of the two has {m} {i}? Who is it that has {m} {i}? {p} or {q}: who has {m}? Do you know who has {m} {i}?",
    "Please say who has {m} {i}. Who has {m} {i}, {p} or {q}?",
)
SORT = wordings(
    "Put {a}, {b} and {c} in order. Put the numbers {a}, {b} and {c} in order."
    " What is the order of {a}, {b} and {c}? Say {a}, {b} and {c} in order. Can you put {a}, {b} and {c} in order?"
    " Count in order: {a}, {b} and {c}. In order, what are {a}, {b} and {c}?"
    " Do you know the order of {a}, {b} and {c}?",
    "Please put {a}, {b} and {c} in order. Say the order of the numbers {a}, {b} and {c}.",
)
FINGERS = 6
NEW_SUMS = 1 / 3  # of the held-out problems have a sum in them that is held out; the others are new as a whole


def near(dice: Dice, right: int, most: int) -> int:
    """A number that is off by one, two or three."""
    while True:
        found = right + dice.pick((-3, -2, -1, 1, 2, 3))
        if 0 <= found <= most:
            return found


def sum_case(w: World, dice: Dice, held: bool) -> Case:
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


def sum_text(w: World, dice: Dice, held: bool) -> str:
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
    """Counted on the fingers where they suffice: `5 + 3: 1 6, 2 7, 3 8.` Ends with the result, right or wrong."""
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


def chain(w: World, dice: Dice, held: bool) -> list[Step]:
    """Sums that follow from each other; held out, one of them or their order is in no training file."""
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
        changes = [b if sign == "+" else -b for _, sign, b, _ in found]
        new_chain = chain_held(found[0][0], *changes) == held
        if any(sum_held(a, sign, b) for a, sign, b, _ in found) if new_sum else new_chain:
            return found


def steps_case(w: World, dice: Dice, held: bool) -> Case:
    steps = chain(w, dice, held)
    start, result = steps[0][0], steps[-1][3]
    if dice.random() < 0.25:
        prompt = BARE.draw(dice, held).format(x=f"{start}" + "".join([f" {sign} {b}" for _, sign, b, _ in steps]))
        sentence = "It is {}."
    else:
        person, item = dice.pick(w.names), dice.pick(w.items)
        prompt = f"{problem(dice, person, item, steps)} {NOW.draw(dice, held).format(i=item, p=person)}"
        sentence = f"{person} has {{}} {item}."
    wrong, (a, sign, b, _) = near(dice, result, w.most), steps[-1]
    work, wrong_work = (" ".join(map(worked, [*steps[:-1], (a, sign, b, last)])) for last in (result, wrong))
    return said_so("steps", prompt, str(result), str(wrong), sentence, work=work, wrong_work=wrong_work)


def problem(dice: Dice, person: str, item: str, steps: list[Step]) -> str:
    return " ".join(
        [begin(dice, person, steps[0][0], item), *[go_on(dice, person, sign, b, item) for _, sign, b, _ in steps]]
    )


def steps_text(w: World, dice: Dice, held: bool) -> str:
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


def numbers(w: World, dice: Dice, count: int, held: bool, least: int = 0) -> list[int]:
    """Different ones. Each pair of them may be compared, or, held out, one pair at least never is in a training file."""
    while True:
        found = dice.some(range(least, w.most + 1), count)
        kept = [order_held(one, other) for at, one in enumerate(found) for other in found[:at]]
        if any(kept) == held:
            return found


def compared(a: int, b: int, more: bool, right: bool = True) -> str:
    first, second = (a, b) if (a > b) == (more == right) else (b, a)
    return f"{first} is {'more' if more else 'less'} than {second}."


def order_case(w: World, dice: Dice, held: bool) -> Case:
    draw = dice.random()
    if draw < 0.3:
        return _sorted(w, dice, held)
    # From a number back to whose it is: more than half a million parameters learn in minutes.
    people = draw >= 0.65 and w.level > 0
    a, b = numbers(w, dice, 2, held, least=2 if people else 0)
    more = dice.random() < 0.5
    word, best, other = ("more", max(a, b), min(a, b)) if more else ("less", min(a, b), max(a, b))
    said, wrong_said = compared(a, b, more), compared(a, b, more, right=False)
    if not people:
        return Case("order", WHICH.draw(dice, held).format(m=word, a=a, b=b), str(best), said, str(other), wrong_said)
    (p, q), item = dice.some(w.names, 2), dice.pick(w.items)
    prompt = f"{p} has {a} {item}. {q} has {b} {item}. " + WHO.draw(dice, held).format(m=word, i=item, p=p, q=q)
    answer, wrong = (p, q) if best == a else (q, p)
    return Case("order", prompt, answer, said, wrong, wrong_said, among=w.names)


def _sorted(w: World, dice: Dice, held: bool) -> Case:
    found = numbers(w, dice, 3, held)
    a, b, c = sorted(found)
    answer = f"{a}, {b}, {c}"
    wrong = dice.pick((f"{b}, {a}, {c}", f"{a}, {c}, {b}"))
    prompt = SORT.draw(dice, held).format(a=found[0], b=found[1], c=found[2])
    return said_so("order", prompt, answer, wrong, "The order is {}.")


def order_text(w: World, dice: Dice, held: bool) -> str:
    draw = dice.random()
    if draw < 0.4:
        pairs = [numbers(w, dice, 2, held) for _ in range(6)]
        return " ".join([compared(a, b, dice.random() < 0.5) for a, b in pairs])
    if draw < 0.7:
        told = []
        for _ in range(4):
            found = numbers(w, dice, 3, held)
            a, b, c = sorted(found)
            named = dice.pick(("", "", "the numbers "))
            told.append(f"The order of {named}{found[0]}, {found[1]} and {found[2]} is {a}, {b}, {c}.")
        return " ".join(told)
    told = []
    for _ in range(2):
        a, b = numbers(w, dice, 2, held, least=2)
        (p, q), item, more = dice.some(w.names, 2), dice.pick(w.items), dice.random() < 0.5
        best = p if (a > b) == more else q
        told.append(
            f"{p} has {a} {item}. {q} has {b} {item}. {compared(a, b, more)} So {best} has {'more' if more else 'less'}"
            f" {item}."
        )
    return " ".join(told)
