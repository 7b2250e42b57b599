"""One question of the world with its right and its wrong answer, and the forms an answer is given in."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from stoker.training.world.world import Dice

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
