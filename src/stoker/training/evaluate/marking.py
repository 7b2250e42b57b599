"""Is an answer in the expected form, and right in that form? This strict rule is GRPO's reward. content.py has the rule
that evaluation counts by. No torch.
"""

from __future__ import annotations

import re
from decimal import Decimal

_STATED = re.compile(r"answer is\b|\banswer\W{0,3}:|####", re.IGNORECASE)
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,])", re.ASCII)
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)", re.ASCII)
_WITH_UNIT = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(?: ?[%€£°]| ?[^\W\d_]+(?: [^\W\d_]+)?)", re.ASCII | re.IGNORECASE)
_NO_UNIT = {"or", "and", "to", "plus", "minus", "times", "not", "x"}  # an answer that leaves something open
_WORD = re.compile(r"[^\W_]+(?:['’.\-][^\W_]+)*")
_AROUND = " \t\r\f\v\u00a0:\"'`*“”‘’«»"
_BEHIND = ".,!?"


def marked_part(text: str) -> str | None:
    """What follows the last mark of an answer: in the last \\boxed{}, or after the last "answer is", "answer:" or "####". None: the text has no mark."""
    marks, boxes = list(_STATED.finditer(text)), list(_BOXED.finditer(text))
    if boxes and (not marks or boxes[-1].end() > marks[-1].end()):
        return boxes[-1][1]
    return text[marks[-1].end() :] if marks else None


def stated(text: str) -> str:
    """What a text gives as its answer: the part after its last mark, else the whole; the first line of that, bare and
    in lowercase.
    """
    part = marked_part(text)
    line = first_line(text if part is None else part)
    return _bare(without_thousands(_bare(line).lower().replace("$", "")))


def right_in_form(completion: str, answer: str) -> bool:
    """The stated answer is the same text or the same number. An answer that states nothing is wrong, whatever was
    asked.
    """
    said, wanted = stated(completion), stated(answer)
    if not said:
        return False
    if said == wanted:
        return True
    number = _number(said)
    return number is not None and _NUMBER.fullmatch(wanted) is not None and Decimal(number) == Decimal(wanted)


def in_form(completion: str, answer: str) -> bool:
    """Right or wrong, the answer stands alone where the strict rule looks for it: a number, or no more words than the
    expected answer has.
    """
    said = stated(completion)
    return bool(said) and (_number(said) is not None or len(words(said)) <= max(len(words(stated(answer))), 1))


def words(text: str) -> tuple[str, ...]:
    return tuple(_WORD.findall(text.lower()))


def first_line(text: str) -> str:
    rest = text.lstrip(": \t\r\n*")
    return rest.splitlines()[0] if rest else ""


def without_thousands(text: str) -> str:
    return _THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)


def _number(said: str) -> str | None:
    """72, or 72 with its unit: 72 clips, 72%."""
    if _NUMBER.fullmatch(said):
        return said
    with_unit = _WITH_UNIT.fullmatch(said)
    return with_unit[1] if with_unit and not _NO_UNIT & set(re.findall(r"[a-z]+", said)) else None


def _bare(text: str) -> str:
    """Quotes and full stops nest ("72."), so both ends are taken off until nothing changes."""
    while True:
        less = text.strip(_AROUND).rstrip(_BEHIND)
        if less == text:
            return text
        text = less
