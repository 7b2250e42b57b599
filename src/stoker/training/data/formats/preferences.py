"""Preference pairs: chosen and rejected, with or without a prompt, as dialogues in a text or as lists of messages."""

from __future__ import annotations

import re
from typing import Any

from stoker.training.data.formats.format import Format, Preference, Row, Turn, Unusable, turns_of
from stoker.training.tokenizer.roles import LEARNED

_SPEAKER = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")  # as hh-rlhf writes its dialogues
_ROLES = {"Human": "user", "Assistant": LEARNED}


def dialogue(text: str) -> list[Turn] | None:
    """The turns of "\\n\\nHuman: … \\n\\nAssistant: …"; None: it is not written like that."""
    first = _SPEAKER.match(text)
    if first is None:
        return None
    marks = list(_SPEAKER.finditer(text))
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    return [(_ROLES[mark[1]], text[mark.end() : end].strip()) for mark, end in zip(marks, ends, strict=True)]


def _prompt(value: Any) -> list[Turn]:
    if value is None:
        return []
    if not isinstance(value, str):
        turns = turns_of(value, "prompt")
        if not turns:
            raise Unusable("prompt is empty")
        return turns
    turns = dialogue(value) or [("user", value)]
    return turns[:-1] if turns[-1] == (LEARNED, "") else turns  # "… \n\nAssistant:": the answer begins here


def _whole(prompt: list[Turn], value: Any, what: str) -> list[Turn]:
    """The prompt and the answer. Some publishers repeat the prompt in the answer, some don't."""
    if isinstance(value, str):
        turns = dialogue(value)
        if turns is None:
            if not prompt:
                raise Unusable(f"no prompt, and {what} is not a dialogue of Human: and Assistant: turns")
            return [*prompt, (LEARNED, value)]
    elif isinstance(value, (list, tuple)):
        turns = turns_of(value, what)
    else:
        kind = "missing" if value is None else f"a {type(value).__name__}"
        raise Unusable(f"{what} is {kind}: chosen and rejected must be texts or lists of messages")
    repeated = any(role == "user" for role, _ in turns)
    return turns if repeated else [*prompt, *turns]


def preference(row: Row) -> Preference:
    """What both have in common is the prompt; the answers begin where they part ways."""
    for column in ("chosen", "rejected"):
        if column not in row:
            raise Unusable(f"no {column}; found {', '.join(map(str, list(row)[:5])) or 'nothing'}")
    prompt = _prompt(row.get("prompt"))
    chosen, rejected = _whole(prompt, row["chosen"], "chosen"), _whole(prompt, row["rejected"], "rejected")
    for what, turns in (("chosen", chosen), ("rejected", rejected)):
        if not turns:
            raise Unusable(f"{what} is an empty conversation")
    if chosen == rejected:
        raise Unusable("chosen and rejected are the same text")
    same = 0
    while same < min(len(chosen), len(rejected)) and chosen[same] == rejected[same]:
        same += 1
    for what, answer in (("chosen", chosen[same:]), ("rejected", rejected[same:])):
        if not answer or answer[-1][0] != LEARNED:
            raise Unusable(f"{what} does not end with an answer of the assistant")
        if not answer[-1][1].strip():
            raise Unusable(f"{what} has an empty answer")
        if answer[0][0] != LEARNED:
            raise Unusable("chosen and rejected answer different prompts")
    if not any(role == "user" for role, _ in chosen[:same]):
        raise Unusable("no prompt")
    return Preference(
        tuple(chosen[:same]), tuple(chosen[same:]), tuple(rejected[same:]), str(row.get("kind") or "all")[:80]
    )


def _chosen(row: Row) -> list[Turn]:
    pair = preference(row)
    return [*pair.prompt, *pair.chosen]


FORMATS = (
    Format(
        "preference",
        "chosen and rejected answers",
        ("prompt", "chosen", "rejected", "kind"),
        lambda row: "chosen" in row or "rejected" in row,
        _chosen,
        preference,
    ),
)
