"""Outcomes to numbers: per task, per kind and of all, each with its 95 % interval; and the table people read. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from stoker.training.evaluate.answering import Marked, Outcome
from stoker.training.evaluate.confidence import wilson, wilson_of_draws

SHOWN = 3  # samples per kind
MANY_CUT = 0.02  # a share of cut answers from which the token limit is too low to measure by
_SHARE = ("correct", "total", "accuracy", "low", "high")


def score(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Right by content; `strict`: right in the expected form; `form`: in that form, right or wrong; `cut`: at the token
    limit, of written answers.
    """
    written = [outcome for outcome in outcomes if outcome.open]
    greedy = [outcome.greedy for outcome in outcomes]
    return {
        **_share("", [mark.correct for mark in greedy]),
        **_share("strict_", [mark.strict for mark in greedy]),
        **_share("form_", [mark.in_form for mark in greedy]),
        **_share("cut_", [outcome.greedy.cut for outcome in written]),
        **_share_of_samples(
            "sampled_", [[mark.correct for mark in outcome.sampled] for outcome in outcomes if outcome.sampled]
        ),
        **_share_of_samples(
            "sampled_cut_", [[mark.cut for mark in outcome.sampled] for outcome in outcomes if outcome.sampled]
        ),
    }


def _share(prefix: str, hits: Sequence[bool]) -> dict[str, Any]:
    within = wilson(sum(hits), len(hits))
    return _keys(prefix, sum(hits), len(hits), within.low, within.high)


def _share_of_samples(prefix: str, hits: Sequence[Sequence[bool]]) -> dict[str, Any]:
    """Of so many answers to each question."""
    within = wilson_of_draws([sum(some) for some in hits], len(hits[0]) if hits else 0)
    return _keys(prefix, sum(map(sum, hits)), sum(map(len, hits)), within.low, within.high)


def _keys(prefix: str, correct: int, total: int, low: float, high: float) -> dict[str, Any]:
    values = (correct, total, correct / total, low, high) if total else (0, 0, None, None, None)
    return {prefix + key: value for key, value in zip(_SHARE, values, strict=True)}


def metrics(outcomes: Sequence[Outcome], bits_per_byte: float | None) -> dict[str, Any]:
    return {
        "tasks": {
            name: score([one for one in outcomes if one.task == name])
            for name in _in_order(one.task for one in outcomes)
        },
        "kinds": {
            name: score([one for one in outcomes if one.kind == name])
            for name in _in_order(one.kind for one in outcomes)
        },
        "all": score(outcomes),
        "bits_per_byte": bits_per_byte,
    }


def samples(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """The first few of each kind: the same questions for every stage's model."""
    shown = []
    for kind in _in_order(one.kind for one in outcomes):
        for outcome in [one for one in outcomes if one.kind == kind][:SHOWN]:
            shown.append({"prompt": outcome.prompt, "answer": outcome.answer, **_marks(outcome.greedy), "kind": kind})
    return shown


def row(outcome: Outcome) -> dict[str, Any]:
    """A line of completions.jsonl."""
    asked = {name: getattr(outcome, name) for name in ("task", "index", "kind", "prompt", "answer")}
    return {**asked, **_marks(outcome.greedy), "sampled": [_marks(mark) for mark in outcome.sampled]}


def _marks(mark: Marked) -> dict[str, Any]:
    return {
        "completion": mark.completion,
        "correct": mark.correct,
        "in_form": mark.in_form,
        "strict": mark.strict,
        "cut": mark.cut,
    }


def table(scored: dict[str, Any]) -> list[str]:
    """Lines for the console."""
    lines = [
        f"{'':24} {'right':>11}  {'greedy':>7}  {'95 %':<15} {'sampled':>7}  {'95 %':<15} {'in form':>7} {'cut':>6}"
    ]
    several = len(scored["tasks"]) > 1
    kinds = scored["kinds"].items() if len(scored["kinds"]) > 1 or not several else ()
    for name, share in (*(scored["tasks"].items() if several else ()), *kinds, ("all", scored["all"])):
        shares = (
            f"{_with_interval(share, '')}  {_with_interval(share, 'sampled_')} {_percent(share, 'form_')}"
            f" {_percent(share, 'cut_'):>6}"
        )
        lines.append(f"{name[:24]:24} {share['correct']:>5}/{share['total']:<5}  {shares}")
    if scored["bits_per_byte"] is not None:
        lines.append(f"bits per byte {scored['bits_per_byte']:.4f}")
    return lines


def _with_interval(share: dict[str, Any], prefix: str) -> str:
    if share[f"{prefix}accuracy"] is None:
        return f"{'n/a':>7}  {'':<15}"
    within = f"{share[f'{prefix}low']:.1%} to {share[f'{prefix}high']:.1%}"
    return f"{share[f'{prefix}accuracy']:>7.1%}  {within:<15}"


def _percent(share: dict[str, Any], prefix: str) -> str:
    value = share[f"{prefix}accuracy"]
    return f"{'n/a' if value is None else f'{value:.1%}':>7}"


def _in_order(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
