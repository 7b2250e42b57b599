"""What is measured of a model's answers, how two models compare, and diversity_report.md, which says so. Pure.

A set is measured again for every round of the bootstrap: what can be counted once per prompt is, a round adds it up.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.contract.frozen import frozen
from stoker.contract.units import plural
from stoker.training.density.points import Vectors, evenness, gini
from stoker.training.evaluate.confidence import around, holm, p_value

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
    """Up to 4-grams, or as many words as there are; above single words one is added to counts (Lin and Och 2004)."""
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
    """How many different ones they amount to: exp of the entropy of their similarities (Friedman and Dieng 2023)."""
    points = vectors.astype(np.float64)
    values = np.linalg.eigvalsh(points @ points.T / len(points))
    values = values[values > 1e-12]
    return float(np.exp(-(values * np.log(values)).sum()))


Floats = NDArray[np.float64]


@frozen
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


def _shares(of: Callable[[Sequence[float]], float]) -> Callable[[Counted, NDArray[np.int64]], float]:
    return lambda counted, prompts: of(counted.clusters[prompts].sum(0).tolist())


METRICS: dict[str, Metric] = {
    **{f"distinct_{n}": Metric(f"different {what} of a prompt's answers, share", 1, _mean(f"distinct_{n}"))
       for n, what in ((1, "words"), (2, "pairs of words"), (3, "triples of words"))},
    "self_bleu": Metric("BLEU of an answer against the others of its prompt", -1, _mean("self_bleu")),
    "spread": Metric("mean cosine distance of a prompt's answers", 1, _mean("spread")),
    "vendi": Metric("Vendi score: how many different answers a prompt has", 1, _mean("vendi")),
    "gini": Metric("Gini over clusters of all answers (0: evenly)", -1, _shares(gini)),
    "entropy": Metric("entropy over clusters (1: evenly)", 1, _shares(evenness)),
    "vocabulary": Metric("different words in all answers", 1, _vocabulary, twice=False),
    "vocabulary_per_1000": Metric("different words per 1,000 words", 1, _per_thousand, twice=False),
    "length": Metric("words per answer", 0, _mean("length")),
}  # fmt: skip

# Two models' answers to the same prompts: differences, how sure they are, and one verdict. Pure.
SAME = "no difference"
ROUNDING = 1e-9  # a difference this small beside the values is the arithmetic's


@frozen
class Compared:
    name: str
    baseline: float
    compared: float
    baseline_error: float
    compared_error: float
    error: float  # of the difference: prompts are paired, so it is smaller than the two would make it

    @property
    def difference(self) -> float:
        found = self.compared - self.baseline
        return 0.0 if abs(found) <= ROUNDING * max(abs(self.compared), abs(self.baseline)) else found

    @property
    def p(self) -> float:
        return p_value(self.difference, self.error)

    @property
    def verdict(self) -> str:
        """By this metric alone."""
        within = around(self.difference, self.error)
        if within.low <= 0 <= within.high:
            return SAME
        return "compared higher" if self.difference > 0 else "baseline higher"


def compare(baseline: Counted, compared: Counted, rounds: int, seed: int) -> list[Compared]:
    """The same prompts are sampled for both in each round of the bootstrap. A round has some two thirds of the prompts, some
    twice. Words that are counted once however often they come vary less between such rounds than between sets of prompts
    (two equal models differed in vocabulary in a quarter of all comparisons): for those each prompt in turn is left out
    instead, the jackknife, whose error is never too small on average (Efron and Stein 1981).
    """
    count = len(baseline.clusters)
    every = np.arange(count)
    # With replacement.
    draws = np.random.default_rng(seed).integers(0, count, size=(rounds, count), dtype=np.int64)
    without = [np.delete(every, place) for place in every]
    found = []
    for name, metric in METRICS.items():
        sets = draws if metric.twice else without
        first = np.array([metric.of_prompts(baseline, prompts) for prompts in sets])
        second = np.array([metric.of_prompts(compared, prompts) for prompts in sets])
        sides = (first, second, second - first)
        errors = [_deviation(one, count) if metric.twice else float(np.sqrt((count - 1) * one.var())) for one in sides]
        found.append(Compared(name, metric.of_prompts(baseline, every), metric.of_prompts(compared, every), *errors))
    return found


def _deviation(values: Floats, count: int) -> float:
    """The standard error that a bootstrap's rounds show; theirs is too small by √((n-1)/n), which matters for few."""
    return float(np.std(values, ddof=1)) * math.sqrt(count / (count - 1)) if count > 1 and len(values) > 1 else math.inf


def overall(found: list[Compared]) -> str:
    """One line; among so many measures some differ by chance in two comparisons of five, so Holm's correction decides."""
    about = [one for one in found if METRICS[one.name].varied]
    stands = [one for one, yes in zip(about, holm([one.p for one in about]), strict=True) if yes]
    if not stands:
        return f"{SAME}: none of {len(about)} measures of variety differs beyond chance (Holm-corrected, 5 %)"
    more = [one.name for one in stands if (one.difference > 0) == (METRICS[one.name].varied > 0)]
    less = [one.name for one in stands if one.name not in more]
    parts = [f"{word} varied by {', '.join(names)}" for word, names in (("more", more), ("less", less)) if names]
    return (
        f"the compared model's answers are {' and '.join(parts)} ({len(stands)} of {len(about)} measures of variety,"
        " Holm-corrected, 5 %)"
    )


def told(found: list[Compared]) -> dict[str, Any]:
    """result.json's metrics."""

    def value(middle: float, error: float) -> dict[str, Any]:
        within = around(middle, error)
        return {"value": middle, "low": within.low, "high": within.high}

    return {
        "baseline": {one.name: value(one.baseline, one.baseline_error) for one in found},
        "compared": {one.name: value(one.compared, one.compared_error) for one in found},
        "difference": {one.name: value(one.difference, one.error) | {"verdict": one.verdict} for one in found},
        "verdict": overall(found),
    }


_METHOD = """## Method

1. Both models answer the same prompts with the same seeds. ↑: higher is more varied, ↓: lower is more varied.
2. Self-BLEU: up to 4-grams against at most 8 other answers of the prompt, one added to counts above single words. Embeddings: mean hidden states of one third model, centred over both sets; clusters: k-means on both sets together.
3. Intervals: ± 1.96 standard errors of a bootstrap over prompts, paired, {rounds} rounds. Each row's verdict is its own interval's; the verdict on top is corrected for the number of measures of variety (Holm).
"""
EXAMPLES = 3  # prompts
ANSWERS = 3  # of each model


def report(
    found: dict[str, Any],
    prompts: Sequence[str],
    baseline: Sequence[Sequence[str]],
    compared: Sequence[Sequence[str]],
    names: tuple[str, str],
    rounds: int,
) -> str:
    varied = [name for name in found["difference"] if METRICS[name].varied]
    others = [name for name in found["difference"] if name not in varied]
    few = f"Only {plural(len(prompts), 'prompt')}: take the intervals as rough.\n\n" if len(prompts) < 20 else ""
    page = f"""# Diversity

**{found["verdict"][0].upper()}{found["verdict"][1:]}.**

Baseline: {_inline(names[0])}. Compared: {_inline(names[1])}. {len(prompts)} prompts, {len(baseline[0])} answers to each from both.

{few}{len(varied)} measures of variety:

{_table(found, varied)}

Not a measure of variety, for comparison:

{_table(found, others)}

{_METHOD.format(rounds=rounds)}
## Examples
"""
    lines = page.split("\n")
    for prompt, ours, theirs in list(zip(prompts, baseline, compared, strict=True))[:EXAMPLES]:
        lines += [f"**{_inline(prompt)}**", ""]
        lines += [
            f"- {who}: {_inline(text)}"
            for who, texts in (("baseline", ours), ("compared", theirs))
            for text in texts[:ANSWERS]
        ] + [""]
    return "\n".join(lines)


def _table(found: dict[str, Any], names: Sequence[str]) -> str:
    lines = ["| measure | baseline | compared | difference (95 %) | verdict |", "|---|---:|---:|---:|---|"]
    for name in names:
        moved = found["difference"][name]
        arrow = {1: " ↑", -1: " ↓", 0: ""}[METRICS[name].varied]
        change = f"{_number(moved['value'], True)} ({_number(moved['low'], True)} to {_number(moved['high'], True)})"
        values = f"{_number(found['baseline'][name]['value'])} | {_number(found['compared'][name]['value'])}"
        lines.append(f"| {name}{arrow} {METRICS[name].about} | {values} | {change} | {moved['verdict']} |")
    return "\n".join(lines)


def _number(value: float, sign: bool = False) -> str:
    size = abs(value)
    digits = 1 if size < 1000 else 0
    if size < 10:
        digits = 3
    return f"{value:{'+' if sign else ''},.{digits}f}"


def _inline(text: str) -> str:
    """One line that Markdown takes for text."""
    line = "".join(sign if sign.isprintable() else "\ufffd" for sign in " ".join(text.split()))[:400]
    for sign in "\\`*_[]<>|#":
        line = line.replace(sign, "\\" + sign)
    return line or "(nothing)"
