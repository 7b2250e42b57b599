"""diversity_report.md: what two models' answers have shown, for people. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.contract.shape import shape
from stoker.training.diversity.metrics import METRICS, Counted
from stoker.training.evaluate.confidence import around, deviation, holm, p_value, resamples

# Two models' answers to the same prompts: differences, how sure they are, and one verdict. Pure.


SAME = "no difference"
ROUNDING = 1e-9  # a difference this small beside the values is the arithmetic's


@shape
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
    """The same prompts are sampled for both in each round of the bootstrap. Intervals are ± 1.96 standard errors around
    what was measured.

    A round has some two thirds of the prompts, some of them twice. Words that are counted once however often they come
    vary less between such rounds than between sets of prompts (two equal models differed in vocabulary in a quarter of
    all comparisons), so for those each prompt in turn is left
    out instead: the jackknife, whose error is never too small on average (Efron and Stein 1981)."""
    count = len(baseline.clusters)
    every = np.arange(count)
    draws, without = resamples(count, rounds, seed), [np.delete(every, place) for place in every]
    found = []
    for name, metric in METRICS.items():
        sets = draws if metric.twice else without
        first = np.array([metric.of_prompts(baseline, prompts) for prompts in sets])
        second = np.array([metric.of_prompts(compared, prompts) for prompts in sets])
        errors = [deviation(one, count) if metric.twice else _jackknife(one) for one in (first, second, second - first)]
        found.append(Compared(name, metric.of_prompts(baseline, every), metric.of_prompts(compared, every), *errors))
    return found


def _jackknife(values: NDArray[np.float64]) -> float:
    """The standard error, from the values without each one."""
    return float(np.sqrt((len(values) - 1) * values.var()))


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
    lines = ["# Diversity", "", f"**{found['verdict'][0].upper()}{found['verdict'][1:]}.**", ""]
    lines += [
        (
            f"Baseline: {_inline(names[0])}. Compared: {_inline(names[1])}. {len(prompts)} prompts, {len(baseline[0])}"
            " answers to each from both."
        ),
        "",
    ]
    if len(prompts) < 20:
        lines += [f"Only {len(prompts)} prompts: take the intervals as rough.", ""]
    varied = [name for name in found["difference"] if METRICS[name].varied]
    lines += [
        f"{len(varied)} measures of variety:",
        "",
        *_table(found, varied),
        "",
        "Not a measure of variety, for comparison:",
        "",
    ]
    lines += _table(found, [name for name in found["difference"] if name not in varied])
    lines += [
        "",
        "## Method",
        "",
        (
            "1. Both models answer the same prompts with the same seeds. ↑: higher is more varied, ↓: lower is more"
            " varied."
        ),
        (
            "2. Self-BLEU: up to 4-grams against at most 8 other answers of the prompt, one added to counts above"
            " single words. Embeddings: mean hidden states of one third model, centred over both sets; clusters:"
            " k-means on both sets together."
        ),
        (
            f"3. Intervals: ± 1.96 standard errors of a bootstrap over prompts, paired, {rounds} rounds. Each row's"
            " verdict is its own interval's; the verdict on top is corrected for the number of measures of variety"
            " (Holm)."
        ),
        "",
        "## Examples",
        "",
    ]
    for prompt, ours, theirs in list(zip(prompts, baseline, compared, strict=True))[:EXAMPLES]:
        lines += [f"**{_inline(prompt)}**", ""]
        lines += [
            f"- {who}: {_inline(text)}"
            for who, texts in (("baseline", ours), ("compared", theirs))
            for text in texts[:ANSWERS]
        ] + [""]
    return "\n".join(lines)


def _table(found: dict[str, Any], names: Sequence[str]) -> list[str]:
    lines = ["| measure | baseline | compared | difference (95 %) | verdict |", "|---|---:|---:|---:|---|"]
    for name in names:
        moved = found["difference"][name]
        arrow = {1: " ↑", -1: " ↓", 0: ""}[METRICS[name].varied]
        change = f"{_number(moved['value'], True)} ({_number(moved['low'], True)} to {_number(moved['high'], True)})"
        values = f"{_number(found['baseline'][name]['value'])} | {_number(found['compared'][name]['value'])}"
        lines.append(f"| {name}{arrow} {METRICS[name].about} | {values} | {change} | {moved['verdict']} |")
    return lines


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
