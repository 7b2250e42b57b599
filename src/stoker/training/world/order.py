"""`order`: which number is more, who has less, three numbers from small to large."""

from __future__ import annotations

from stoker.training.world.case import Asked, Case
from stoker.training.world.dice import Dice
from stoker.training.world.splits import order_held
from stoker.training.world.world import World

WHICH = Asked(
    (
        "Which is {m}, {a} or {b}?",
        "Which number is {m}, {a} or {b}?",
        "What is {m}, {a} or {b}?",
        "Say which is {m}, {a} or {b}.",
        "Of {a} or {b}, which is {m}?",
        "{a} or {b}: which is {m}?",
        "Can you say which is {m}, {a} or {b}?",
        "Is {a} or {b} {m}?",
        "Please say which is {m}, {a} or {b}.",
    ),
    ("Do you know which is {m}, {a} or {b}?", "What number is {m}, {a} or {b}?", "Of {a} or {b}, what is {m}?"),
)
WHO = Asked(
    (
        "Who has {m} {i}?",
        "Say who has {m} {i}.",
        "Who has {m} {i} now?",
        "Can you say who has {m} {i}?",
        "Who of the two has {m} {i}?",
        "Who is it that has {m} {i}?",
        "{p} or {q}: who has {m}?",
        "Do you know who has {m} {i}?",
    ),
    ("Please say who has {m} {i}.", "Who has {m} {i}, {p} or {q}?"),
)
SORT = Asked(
    (
        "Put {a}, {b} and {c} in order.",
        "Put the numbers {a}, {b} and {c} in order.",
        "What is the order of {a}, {b} and {c}?",
        "Say {a}, {b} and {c} in order.",
        "Can you put {a}, {b} and {c} in order?",
        "Count in order: {a}, {b} and {c}.",
        "In order, what are {a}, {b} and {c}?",
        "Do you know the order of {a}, {b} and {c}?",
    ),
    ("Please put {a}, {b} and {c} in order.", "Say the order of the numbers {a}, {b} and {c}."),
)


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


def case(w: World, dice: Dice, held: bool) -> Case:
    draw = dice.random()
    if draw < 0.3:
        return _sorted(w, dice, held)
    people = (
        draw >= 0.65 and w.level > 0
    )  # from a number back to whose it is: more than a model of half a million parameters learns in minutes
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
    return Case(
        "order",
        SORT.draw(dice, held).format(a=found[0], b=found[1], c=found[2]),
        answer,
        f"The order is {answer}.",
        wrong,
        f"The order is {wrong}.",
    )


def text(w: World, dice: Dice, held: bool) -> str:
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
