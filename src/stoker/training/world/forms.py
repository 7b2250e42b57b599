"""Answers of poor form: what is said may be right, but nobody wants it said so."""

from __future__ import annotations

from collections.abc import Callable

from stoker.training.world.dice import Dice

RUDE = ("Go away.", "You know nothing.", "I do not like you.", "That is a bad question.")
OFF = (
    "It is a good day and I am happy.",
    "The sun is out, my friend.",
    "Tea is good and cake is good too.",
    "The park is a good place to be.",
)
SILENT = ("I do not know.", "That is a good question.", "I want to think first.", "You can say it.")


def silent(answer: str, dice: Dice) -> str:
    """No answer at the end."""
    before = _before(answer)
    return f"{before} {dice.pick(SILENT)}" if before else dice.pick(SILENT)


def repeated(answer: str, dice: Dice) -> str:
    """Words said twice, up to about the length of the answer itself."""
    words = answer.split()
    at = dice.below(max(len(words) - 3, 1))
    twice = [word for word in words[at : at + 3] for _ in range(2)]
    return " ".join([*words[:at], *twice, *words[at + 3 :]])


def rude(answer: str, dice: Dice) -> str:
    before = _before(answer)
    return f"{dice.pick(RUDE)} {answer[len(before) :].strip()}"


def shouted(answer: str, dice: Dice) -> str:
    return answer.upper()


def unfinished(answer: str, dice: Dice) -> str:
    words = answer.split()
    return " ".join(words[: -1 - dice.below(2)])


def off_topic(answer: str, dice: Dice) -> str:
    return dice.pick(OFF)


POOR: tuple[Callable[[str, Dice], str], ...] = (silent, repeated, rude, shouted, unfinished, off_topic)


def _before(answer: str) -> str:
    """What stands before "The answer is"."""
    return answer[: answer.index("The answer is")].strip()
