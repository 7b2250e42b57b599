"""diversity_report.md: what two models' answers have shown, for people. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stoker.training.diversity.metrics import METRICS

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
    digits = 3 if size < 10 else 1 if size < 1000 else 0
    return f"{value:{'+' if sign else ''},.{digits}f}"


def _inline(text: str) -> str:
    """One line that Markdown takes for text."""
    line = "".join(sign if sign.isprintable() else "\ufffd" for sign in " ".join(text.split()))[:400]
    for sign in "\\`*_[]<>|#":
        line = line.replace(sign, "\\" + sign)
    return line or "(nothing)"
