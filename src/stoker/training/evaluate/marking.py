"""Is an answer right? What evaluation counts and what GRPO rewards is the same question, asked here. No torch."""

from __future__ import annotations

import re
from decimal import Decimal

_STATED = re.compile(r"answer is\b|\banswer\W{0,3}:|####", re.IGNORECASE)
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,])", re.ASCII)
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)", re.ASCII)
_WITH_UNIT = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(?: ?[%€£°]| ?[^\W\d_]+(?: [^\W\d_]+)?)", re.ASCII | re.IGNORECASE)
_NO_UNIT = {"or", "and", "to", "plus", "minus", "times", "not", "x"}  # an answer that leaves something open
_AROUND = " \t\r\f\v\u00a0:\"'`*“”‘’«»"
_BEHIND = ".,!?"


def stated(text: str) -> str:
    """What a text gives as its answer: in the last \\boxed{}, or after the last "answer is", "answer:" or "####", else the whole; its first line, bare and
    in lowercase."""
    marks, boxes = list(_STATED.finditer(text)), list(_BOXED.finditer(text))
    rest = text[marks[-1].end() :] if marks else text
    if boxes and (not marks or boxes[-1].end() > marks[-1].end()):
        rest = boxes[-1][1]
    rest = rest.lstrip(": \t\r\n*")
    line = _bare(rest.splitlines()[0] if rest else "").lower().replace("$", "")
    return _bare(_THOUSANDS.sub(lambda found: found[0].replace(",", ""), line))


def right(completion: str, answer: str) -> bool:
    """An answer that states nothing is wrong, whatever was asked."""
    said, wanted = stated(completion), stated(answer)
    if not said:
        return False
    if said == wanted:
        return True
    number = _number(said)
    return number is not None and _NUMBER.fullmatch(wanted) is not None and Decimal(number) == Decimal(wanted)


def _number(said: str) -> str | None:
    """72, or 72 with its unit: 72 clips, 72%."""
    if _NUMBER.fullmatch(said):
        return said
    found = _WITH_UNIT.fullmatch(said)
    return found[1] if found and not _NO_UNIT & set(re.findall(r"[a-z]+", said)) else None


def _bare(text: str) -> str:
    """Quotes and full stops nest ("72."), so both ends are taken off until nothing changes."""
    while True:
        less = text.strip(_AROUND).rstrip(_BEHIND)
        if less == text:
            return text
        text = less
