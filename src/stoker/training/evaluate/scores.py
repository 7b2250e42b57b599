"""Outcomes to numbers: per task, per kind and of all, each with its 95 % interval; and the table people read. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from stoker.training.evaluate.answering import Outcome
from stoker.training.evaluate.confidence import wilson, wilson_of_draws

SHOWN = 3  # samples per kind
_DRAWN = ("drawn_correct", "drawn_total", "drawn_accuracy", "drawn_low", "drawn_high")


def score(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    total, correct = len(outcomes), sum(one.correct for one in outcomes)
    if not total:
        return {"correct": 0, "total": 0, **dict.fromkeys(("accuracy", "low", "high", *_DRAWN))}
    within = wilson(correct, total)
    found: dict[str, Any] = {"correct": correct, "total": total, "accuracy": correct / total, "low": within.low, "high": within.high}
    drawn = [one for one in outcomes if one.drawn]
    if not drawn:
        return found | dict.fromkeys(_DRAWN)
    each = [sum(good for _, good in one.drawn) for one in drawn]
    count = sum(len(one.drawn) for one in drawn)
    within = wilson_of_draws(each, len(drawn[0].drawn))
    return found | dict(zip(_DRAWN, (sum(each), count, sum(each) / count, within.low, within.high), strict=True))


def metrics(outcomes: Sequence[Outcome], bits_per_byte: float | None) -> dict[str, Any]:
    return {
        "tasks": {name: score([one for one in outcomes if one.task == name]) for name in _in_order(one.task for one in outcomes)},
        "kinds": {name: score([one for one in outcomes if one.kind == name]) for name in _in_order(one.kind for one in outcomes)},
        "all": score(outcomes),
        "bits_per_byte": bits_per_byte,
    }


def samples(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """The first few of each kind: the same questions for every stage's model."""
    found = []
    for kind in _in_order(one.kind for one in outcomes):
        found += [_told(one, ("prompt", "answer", "completion", "correct", "kind")) for one in [one for one in outcomes if one.kind == kind][:SHOWN]]
    return found


def row(outcome: Outcome) -> dict[str, Any]:
    """A line of completions.jsonl."""
    told = _told(outcome, ("task", "index", "kind", "prompt", "answer", "completion", "correct"))
    return told | {"drawn": [{"completion": text, "correct": good} for text, good in outcome.drawn]}


def table(found: dict[str, Any]) -> list[str]:
    """Lines for the console."""
    lines = [f"{'':24} {'right':>11}  {'share':>6}  {'95 %':<15} {'drawn':>6}  {'95 %':<15}"]
    several = len(found["tasks"]) > 1
    parts = [*(found["tasks"].items() if several else ()), *(found["kinds"].items() if len(found["kinds"]) > 1 or not several else ()), ("all", found["all"])]
    for name, told in parts:
        likely, drawn = _share(told, ""), _share(told, "drawn_")
        lines.append(f"{name[:24]:24} {told['correct']:>5}/{told['total']:<5}  {likely}  {drawn}".rstrip())
    if found["bits_per_byte"] is not None:
        lines.append(f"bits per byte {found['bits_per_byte']:.4f}")
    return lines


def _share(told: dict[str, Any], which: str) -> str:
    if told[f"{which}accuracy"] is None:
        return f"{'n/a':>6}  {'':<15}"
    within = f"{told[f'{which}low']:.1%} to {told[f'{which}high']:.1%}"
    return f"{told[f'{which}accuracy']:>6.1%}  {within:<15}"


def _told(outcome: Outcome, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(outcome, name) for name in names}


def _in_order(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
