"""What is measured of a model's answers: a value per prompt where a prompt has one, and of the whole set where only
that has one. Pure.

A set is measured again for every round of the bootstrap, so what can be counted once per prompt is, and a round only
adds it up.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from stoker.contract.shape import shape
from stoker.training.density.points import Vectors, evenness, gini

# How varied answers are by their words. Pure.


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


# How varied answers are by their embeddings. Pure; vectors have length 1.


def spread(vectors: Vectors) -> float:
    """The mean cosine distance between two of them."""
    count = len(vectors)
    if count < 2:
        return 0.0
    together = float((vectors.sum(0, dtype=np.float64) ** 2).sum())
    own = float((vectors.astype(np.float64) ** 2).sum())
    return max(1.0 - (together - own) / (count * (count - 1)), 0.0)


def vendi(vectors: Vectors) -> float:
    """How many different ones they amount to: exp of the entropy of the eigenvalues of the similarities ÷ n (Friedman
    and Dieng 2023).
    """
    points = vectors.astype(np.float64)
    values = np.linalg.eigvalsh(points @ points.T / len(points))
    values = values[values > 1e-12]
    return float(np.exp(-(values * np.log(values)).sum()))


Floats = NDArray[np.float64]


@shape
class Metric:
    about: str
    varied: int  # +1: higher is more varied; -1: lower is; 0: says nothing about it
    of_prompts: Callable[[Counted, NDArray[np.int64]], float]  # the value for these prompts, one may stand there twice
    twice: bool = True  # a prompt that stands there twice counts twice


class Counted:
    """One model's answers, counted: [prompts] means and tables."""

    def __init__(
        self,
        answers: Sequence[Sequence[str]],
        vectors: Sequence[Vectors],
        labels: Sequence[NDArray[np.int64]],
        k: int,
        seed: int,
    ) -> None:
        split = [[words(text) for text in one] for one in answers]
        self.means: dict[str, Floats] = {
            **{f"distinct_{n}": np.array([distinct(one, n) for one in split]) for n in (1, 2, 3)},
            "self_bleu": np.array([self_bleu(one, seed) for one in split]),
            "spread": np.array([spread(one) for one in vectors]),
            "vendi": np.array([vendi(one) for one in vectors]),
            "length": np.array([float(np.mean([len(text) for text in one])) for one in split]),
        }
        self.clusters = np.stack([np.bincount(one, minlength=k) for one in labels])
        bare = [[word for text in one for word in text if word[0].isalnum()] for one in split]
        self.word_counts = np.array([len(one) for one in bare])
        numbers = {word: number for number, word in enumerate(sorted({word for one in bare for word in one}))}
        self.has_word = np.zeros((len(split), max(len(numbers), 1)), dtype=bool)
        for row, one in enumerate(bare):
            self.has_word[row, [numbers[word] for word in one]] = True


def _mean(name: str) -> Callable[[Counted, NDArray[np.int64]], float]:
    return lambda counted, prompts: float(counted.means[name][prompts].mean())


def _vocabulary(counted: Counted, prompts: NDArray[np.int64]) -> float:
    return float(counted.has_word[prompts].any(0).sum())


def _per_thousand(counted: Counted, prompts: NDArray[np.int64]) -> float:
    total = float(counted.word_counts[prompts].sum())
    return 1000 * _vocabulary(counted, prompts) / total if total else 0.0


def _gini(counted: Counted, prompts: NDArray[np.int64]) -> float:
    return gini(counted.clusters[prompts].sum(0).tolist())


def _evenness(counted: Counted, prompts: NDArray[np.int64]) -> float:
    return evenness(counted.clusters[prompts].sum(0).tolist())


METRICS: dict[str, Metric] = {
    **{f"distinct_{n}": Metric(f"different {what} of a prompt's answers, share", 1, _mean(f"distinct_{n}"))
       for n, what in ((1, "words"), (2, "pairs of words"), (3, "triples of words"))},
    "self_bleu": Metric("BLEU of an answer against the others of its prompt", -1, _mean("self_bleu")),
    "spread": Metric("mean cosine distance of a prompt's answers", 1, _mean("spread")),
    "vendi": Metric("Vendi score: how many different answers a prompt has", 1, _mean("vendi")),
    "gini": Metric("Gini over clusters of all answers (0: evenly)", -1, _gini),
    "entropy": Metric("entropy over clusters (1: evenly)", 1, _evenness),
    "vocabulary": Metric("different words in all answers", 1, _vocabulary, twice=False),
    "vocabulary_per_1000": Metric("different words per 1,000 words", 1, _per_thousand, twice=False),
    "length": Metric("words per answer", 0, _mean("length")),
}  # fmt: skip
