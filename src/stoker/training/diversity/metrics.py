"""What is measured of a model's answers: a value per prompt where a prompt has one, and of the whole set where only
that has one. Pure.

A set is measured again for every round of the bootstrap, so what can be counted once per prompt is, and a round only
adds it up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from stoker.contract.shape import shape
from stoker.training.density.gini import evenness, gini
from stoker.training.density.points import Vectors
from stoker.training.diversity.meaning import spread, vendi
from stoker.training.diversity.wording import distinct, self_bleu, words

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
