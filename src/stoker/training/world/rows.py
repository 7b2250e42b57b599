"""The rows of each file, one after the other, as long as they are asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from json.encoder import encode_basestring_ascii as quoted

from stoker.training.world.case import Case, asked, loose, prompt_of, strict
from stoker.training.world.dialogues import small_talk
from stoker.training.world.dice import Dice
from stoker.training.world.forms import POOR
from stoker.training.world.kinds import CASES, SHARES, TEXTS, table
from stoker.training.world.world import World

QUESTIONS_TRIES = 400  # in vain, one after the other: then there are no more different ones


def base(w: World, dice: Dice, held: bool) -> Iterator[str]:
    """Documents: a text of one kind, or a question and its answer in plain text."""
    kinds = table(SHARES["base"])
    while True:
        kind = dice.pick(kinds)
        text = _passage(CASES[kind](w, dice, held), dice) if dice.random() < 0.3 else TEXTS[kind](w, dice, held)
        yield f'{{"text": {quoted(text)}}}'


def _passage(case: Case, dice: Dice) -> str:
    before = "".join([f"{content}\n" for _, content in case.before])
    return f"Question: {before}{case.prompt}\nAnswer: {loose(case, dice, bare=0.25)}"


def midtrain(w: World, dice: Dice, held: bool) -> Iterator[str]:
    """Chats of every kind, answered as people do in chats, mostly in a word, and small talk."""
    kinds = table(SHARES["midtrain"])
    while True:
        if dice.random() < 0.1 and not held:
            yield _chat([{"role": role, "content": content} for role, content in small_talk(w, dice)])
            continue
        case = CASES[dice.pick(kinds)](w, dice, held)
        yield _chat([*asked(case), {"role": "assistant", "content": loose(case, dice, bare=0.6)}])


def sft(w: World, dice: Dice, held: bool) -> Iterator[str]:
    kinds = table(SHARES["sft"])
    while True:
        case = CASES[dice.pick(kinds)](w, dice, held)
        yield _chat([*asked(case), {"role": "assistant", "content": strict(case, dice)}])


def pairs(w: World, dice: Dice, held: bool) -> Iterator[str]:
    """Half are right against wrong in the same form, half are good against poor form of the same."""
    kinds = table(SHARES["pairs"])
    while True:
        case = CASES[dice.pick(kinds)](w, dice, held)
        if dice.random() < 0.5:
            style = 0.0  # both show their steps: two bare numbers are nothing to tell right from wrong by
            kind, chosen, rejected = "right", strict(case, _Fixed(style)), strict(case, _Fixed(style), right=False)
        else:
            kind, chosen = "form", strict(case, dice)
            rejected = dice.pick(POOR)(chosen, dice)
        yield json.dumps({"prompt": prompt_of(case), "chosen": chosen, "rejected": rejected, "kind": kind})


class _Fixed(Dice):
    """A die that always falls the same."""

    def __init__(self, value: float) -> None:
        self.random = lambda: value


def prompts(w: World, dice: Dice, held: bool) -> Iterator[str]:
    """Different ones; ends where there are no more."""
    yield from _questions(w, dice, held, table(SHARES["prompts"]))


def questions(w: World, dice: Dice, held: bool) -> Iterator[str]:
    """As many of each kind, in turn, all different; a kind that has no more is left out."""
    yield from _questions(w, dice, held, list(CASES), in_turn=True)


def _questions(w: World, dice: Dice, held: bool, kinds: list[str], in_turn: bool = False) -> Iterator[str]:
    seen: set[str] = set()
    left, at = list(kinds), 0
    while left:
        kind = left[at % len(left)] if in_turn else dice.pick(left)
        for _ in range(QUESTIONS_TRIES):
            case = CASES[kind](w, dice, held)
            row = json.dumps(
                {"prompt": prompt_of(case), "answer": case.answer, "kind": case.kind, **(_others(case) if held else {})}
            )
            if row not in seen:
                seen.add(row)
                at += 1
                yield row
                break
        else:
            left = [one for one in left if one != kind]


def _others(case: Case) -> dict[str, list[str]]:
    """What would be wrong instead, for whoever marks answers."""
    return {"alternatives": [word for word in case.among if word != case.answer]} if case.among else {}


def _chat(messages: list[dict[str, str]]) -> str:
    return json.dumps({"messages": messages})
