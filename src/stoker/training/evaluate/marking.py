"""Is an answer right? No torch. The strict rule, right in the expected form, is GRPO's reward.

Evaluation counts what it says, whatever its form: "The cow says moo." is right where "moo" is expected. That rule
(docs/pipeline.md) rather calls a right answer wrong than a wrong one right:
- What is right in the expected form is right.
- A number: the last number of the answer counts, and no other.
- A list of numbers: the last list counts.
- Words: the first sentence must hold them, be short, deny nothing, and name no other possible answer.
- An answer that was cut at the token limit has no last number, and a sentence that was cut is no sentence.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from decimal import Decimal

from stoker.contract.frozen import frozen

_STATED = re.compile(r"answer is\b|\banswer\W{0,3}:|####", re.IGNORECASE)
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,])", re.ASCII)
_DECIMAL = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)"
_NUMBER = re.compile(_DECIMAL, re.ASCII)
_WITH_UNIT = re.compile(rf"({_DECIMAL})(?: ?[%€£°]| ?[^\W\d_]+(?: [^\W\d_]+)?)", re.ASCII | re.IGNORECASE)
_NO_UNIT = {"or", "and", "to", "plus", "minus", "times", "not", "x"}  # an answer that leaves something open
_WORD = re.compile(r"[^\W_]+(?:['’.\-][^\W_]+)*")
_AROUND = " \t\r\f\v\u00a0:\"'`*“”‘’«»"
_BEHIND = ".,!?"
MOST_WORDS = 12  # of a sentence, beside the answer's own: more is no answer but a search for one
_DIGITS = r"(?<![\w.])[+-]?(?:\d+(?:\.\d+)?|\.\d+)(?!\d|(?:st|nd|rd|th)\b)"
_NUMBER_IN_TEXT = re.compile(_DIGITS, re.ASCII)
_LIST = re.compile(rf"{_DIGITS}(?:\s*(?:,|;|<|>|\band\b|\bthen\b)\s*(?:and\s+|then\s+)?{_DIGITS})+", re.ASCII)
# What makes the number behind it no stated one: "7 or 8", "not 8", "3 + 8", "5 to 8", "between 7 and 8".
_OPEN = re.compile(r"(?:\bor|\bnot|n't|n’t|[+*/×÷]|\d\s*(?:to|[-–])|\bbetween\s+\S+\s+and)\s*$")
_COMPARED = re.compile(r"\bthan\s+$")  # 6 is more than 4: the 4 is not the answer
_SPELLED = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen",
    "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_ENDED = re.compile(r"[.!?][\"'”’*)\s]*$")
_DENIES = {"not", "no", "never", "neither", "nor", "either", "or", "maybe", "perhaps", "except", "without", "cannot"}
_TAKES_BACK = {"no", "not", "or", "wait", "sorry", "actually", "rather", "but"}  # as the next sentence's first word
_FILLERS = r"(?:(?:the|a|an|in|at|on|of|to|by|from|with|is|was)\s+)*"
_JOINED_BEFORE = re.compile(rf"(?:\band|&|/|(?<!\byes)(?<!\bsure)(?<!\bwell)(?<!\bokay)(?<!\bhello),)\s*{_FILLERS}$")
_JOINED_AFTER = re.compile(r"^\s*(?:,|&|/|and\b)")
_ARTICLES = ("a", "an", "the")


def marked_part(text: str) -> str | None:
    """What follows the last mark of an answer: in the last \\boxed{}, or after the last "answer is", "answer:" or "####". None: the text has no mark."""
    marks, boxes = list(_STATED.finditer(text)), list(_BOXED.finditer(text))
    if boxes and (not marks or boxes[-1].end() > marks[-1].end()):
        return boxes[-1][1]
    return text[marks[-1].end() :] if marks else None


def stated(text: str) -> str:
    """The answer a text gives: the first line after its last mark, or of the whole, bare and in lowercase."""
    part = marked_part(text)
    line = first_line(text if part is None else part)
    return _bare(without_thousands(_bare(line).lower().replace("$", "")))


def right_in_form(completion: str, answer: str) -> bool:
    """The stated answer is the same text or number. An answer that states nothing is wrong, whatever was asked."""
    said, wanted = stated(completion), stated(answer)
    if not said:
        return False
    if said == wanted:
        return True
    number = _number(said)
    return number is not None and _NUMBER.fullmatch(wanted) is not None and Decimal(number) == Decimal(wanted)


def in_form(completion: str, answer: str) -> bool:
    """Right or wrong, it stands alone where the strict rule looks: a number, or no more words than expected."""
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
    """Quotes and full stops nest ("72."), so a mixture of both is taken off behind it."""
    return text.rstrip(_AROUND + _BEHIND).lstrip(_AROUND)


@frozen
class Alternatives:
    """Other answers the question might have had, as words. `asked`: those in the question contradict nothing."""

    phrases: frozenset[tuple[str, ...]] = frozenset()
    asked: tuple[str, ...] = ()

    def named_in(self, said: tuple[str, ...], wanted: tuple[str, ...]) -> bool:
        for length in {len(phrase) for phrase in self.phrases}:
            for begin in range(len(said) - length + 1):
                phrase = said[begin : begin + length]
                if phrase in self.phrases and not _within(phrase, wanted) and not _within(phrase, self.asked):
                    return True
        return False


NO_OTHERS = Alternatives()


def alternatives(answers: Collection[str], question: str = "") -> Alternatives:
    return Alternatives(phrases(answers), words(question))


def phrases(answers: Collection[str]) -> frozenset[tuple[str, ...]]:
    """Numbers are left out: how many pears Anna has does not contradict that it is Anna who has them."""
    given = [stated(answer) for answer in answers]
    return frozenset(
        _phrase(answer) for answer in given if _only_number(answer) is None and not _LIST.fullmatch(answer)
    ) - {()}


def right(completion: str, answer: str, others: Alternatives = NO_OTHERS, *, cut: bool = False) -> bool:
    if right_in_form(completion, answer):
        return True
    part = marked_part(completion)
    wanted = stated(answer)
    text = completion if part is None else first_line(part)
    if _only_number(wanted) is not None:
        return right_number(completion, answer, cut=cut)
    listed = _LIST.fullmatch(wanted)
    if listed:
        return not (cut and part is None) and _last_list(text) == _numbers(wanted)
    return _says(first_line(text), wanted, others, cut)


def right_number(completion: str, answer: str, *, cut: bool = False) -> bool:
    """The last number that is stated, behind a mark where there is one, is the answer's."""
    part, number = marked_part(completion), _only_number(stated(answer))
    text = completion if part is None else first_line(part)
    return number is not None and not (cut and part is None) and _last_number(text) == number


def states_number(answer: str) -> bool:
    return _only_number(stated(answer)) is not None


def _says(line: str, wanted: str, others: Alternatives, cut: bool) -> bool:
    """Whether the line's first sentence states the wanted words, and nothing against them."""
    sentence, *rest = _SENTENCE.split(line.strip())
    said, phrase = words(sentence), _phrase(wanted)
    if not said or not phrase or (cut and not rest and not _ENDED.search(sentence)):
        return False
    if wanted in ("yes", "no"):
        return said[0] == wanted
    if len(wanted) == 1 or len(said) > MOST_WORDS + len(phrase) or not _within(phrase, said):
        return False  # a letter is also a word: it counts alone, which right_in_form has seen to
    against = {word for word in said if word in _DENIES or word.endswith(("n't", "n’t"))} - set(phrase)
    taken_back = bool(rest) and words(rest[0])[:1] != () and words(rest[0])[0] in _TAKES_BACK
    return (
        not against and not taken_back and not others.named_in(said, phrase) and not _joined(sentence.lower(), phrase)
    )


def _joined(sentence: str, phrase: tuple[str, ...]) -> bool:
    """Whether the answer is one of several: "Anna and Ben", "in the park and in the garden"."""
    pattern = r"\b" + r"\W+".join(map(re.escape, phrase)) + r"\b"
    places = list(re.finditer(pattern, sentence))
    return any(
        _JOINED_BEFORE.search(sentence[: place.start()]) or _JOINED_AFTER.search(sentence[place.end() :])
        for place in places
    )


def _last_number(text: str) -> Decimal | None:
    """The last one that is stated. In digits, or spelled where there are no digits."""
    text = without_thousands(text.lower().replace("$", ""))
    if not re.search(r"\d", text):
        spelled = [word for word in words(text) if word in _SPELLED]
        return Decimal(_SPELLED.index(spelled[-1])) if spelled and not set(words(text)) & _DENIES else None
    places, behind_last = [], 0
    for place in _NUMBER_IN_TEXT.finditer(text):
        if not _COMPARED.search(text, behind_last, place.start()):
            places.append(place)
        behind_last = place.end()
    return Decimal(places[-1][0]) if places and not _OPEN.search(text[: places[-1].start()]) else None


def _last_list(text: str) -> list[Decimal]:
    places = list(_LIST.finditer(text))
    return _numbers(places[-1][0]) if places and not _OPEN.search(text[: places[-1].start()]) else []


def _numbers(text: str) -> list[Decimal]:
    return [Decimal(number) for number in _NUMBER_IN_TEXT.findall(text)]


def _only_number(wanted: str) -> Decimal | None:
    if wanted in _SPELLED:
        return Decimal(_SPELLED.index(wanted))
    return Decimal(wanted) if _NUMBER_IN_TEXT.fullmatch(wanted) else None


def _phrase(answer: str) -> tuple[str, ...]:
    """Its words, without an article before them."""
    said = words(answer)
    return said[1:] if len(said) > 1 and said[0] in _ARTICLES else said


def _within(phrase: tuple[str, ...], said: tuple[str, ...]) -> bool:
    return any(said[begin : begin + len(phrase)] == phrase for begin in range(len(said) - len(phrase) + 1))
