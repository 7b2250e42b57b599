"""How varied answers are by their words. Pure."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Sequence

_WORDS = re.compile(r"\w+|[^\w\s]")
_REFERENCES = 8  # others an answer is held against at most
_ORDER = 4

Words = Sequence[str]
Grams = Sequence[Counter[tuple[str, ...]]]  # counted, by their length


def words(text: str) -> list[str]:
    """Words and marks, in lowercase."""
    return _WORDS.findall(text.lower())


def distinct(answers: Sequence[Words], n: int) -> float:
    """Different n-grams among all n-grams of these answers; 0 where they are too short to have any."""
    grams = [gram for answer in answers for gram in _grams(answer, n)]
    return len(set(grams)) / len(grams) if grams else 0.0


def self_bleu(answers: Sequence[Words], seed: int = 0) -> float:
    """The mean BLEU of each answer against the others (8 at most, sampled by the seed): 1 where all are alike."""
    if len(answers) < 2:
        return 0.0
    counts = [[Counter(_grams(answer, n)) for n in range(1, _ORDER + 1)] for answer in answers]
    draw = random.Random(seed)
    found = []
    for place in range(len(answers)):
        others = [other for other in range(len(answers)) if other != place]
        others = draw.sample(others, _REFERENCES) if len(others) > _REFERENCES else others
        found.append(
            _bleu(
                answers[place], counts[place], [answers[other] for other in others], [counts[other] for other in others]
            )
        )
    return sum(found) / len(found)


def _bleu(answer: Words, counts: Grams, references: Sequence[Words], theirs: Sequence[Grams]) -> float:
    """Up to 4-grams, fewer where the answer has fewer words; above single words one is added to both counts (Lin and
    Och 2004).
    """
    if not answer:
        return 1.0 if any(not reference for reference in references) else 0.0
    logs = []
    for n in range(1, min(_ORDER, len(answer)) + 1):
        most: Counter[tuple[str, ...]] = Counter()
        for reference in theirs:
            most |= reference[n - 1]
        matched = (counts[n - 1] & most).total()
        if n == 1 and not matched:
            return 0.0
        more = n > 1
        logs.append(math.log((matched + more) / (counts[n - 1].total() + more)))
    nearest = min((len(reference) for reference in references), key=lambda length: (abs(length - len(answer)), length))
    brevity = min(0.0, 1 - nearest / len(answer))
    return math.exp(brevity + sum(logs) / len(logs))


def _grams(answer: Words, n: int) -> list[tuple[str, ...]]:
    return [tuple(answer[begin : begin + n]) for begin in range(len(answer) - n + 1)]
