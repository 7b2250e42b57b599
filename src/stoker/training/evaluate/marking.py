"""Is an answer right? What evaluation counts and what GRPO rewards is the same question, asked here. No torch."""

from __future__ import annotations

import re
from decimal import Decimal

_STATED = re.compile(r"answer is\b|####", re.IGNORECASE)
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,])", re.ASCII)
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)", re.ASCII)
_AROUND = " \t\r\f\v\u00a0:\"'`*“”‘’«»"
_BEHIND = ".,!?"


def stated(text: str) -> str:
    """What a text gives as its answer: after the last "answer is" or "####", else the whole; its first line, bare and in lowercase."""
    marks = list(_STATED.finditer(text))
    rest = (text[marks[-1].end() :] if marks else text).lstrip(": \t\r\n")
    line = _bare(rest.splitlines()[0] if rest else "").lower().replace("$", "")
    return _bare(_THOUSANDS.sub(lambda found: found[0].replace(",", ""), line))


def right(completion: str, answer: str) -> bool:
    """An answer that states nothing is wrong, whatever was asked."""
    said, wanted = stated(completion), stated(answer)
    if not said:
        return False
    return said == wanted or (_NUMBER.fullmatch(said) is not None and _NUMBER.fullmatch(wanted) is not None and Decimal(said) == Decimal(wanted))


def _bare(text: str) -> str:
    """Quotes and full stops nest ("72."), so both ends are taken off until nothing changes."""
    while True:
        less = text.strip(_AROUND).rstrip(_BEHIND)
        if less == text:
            return text
        text = less
