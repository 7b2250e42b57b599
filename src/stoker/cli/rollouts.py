"""stoker rollouts [RUN] [--most N] [--step N] [--json]"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

from stoker.contract import layout
from stoker.contract.errors import EX_NOINPUT, Refusal, parsing
from stoker.contract.options import OptionParser
from stoker.contract.terminal import print_json, print_text
from stoker.contract.text import escape, is_digits
from stoker.contract.units import plural
from stoker.control.record import run_index
from stoker.control.record.rollouts_log import (
    ENDS,
    PromptChange,
    Rollout,
    RolloutsSummary,
    mean,
    read_rollouts,
    summary,
    to_json,
    typical,
)

_ABOUT = "What a GRPO run answered: the best and the worst of the last steps, and what changed since the first ones."
_PARTS = 20  # of a reward, that are shown
_TEXT = 300  # characters of a prompt or an answer


def parser() -> OptionParser:
    made = OptionParser("stoker rollouts", _ABOUT)
    made.run_argument()
    made.option("--most", "N", "how many of each (default: 3)", _count, default=3)
    made.option("--step", "N", "the answers of this step instead", int)
    made.runs_dir()
    made.switch("--json", "the same as JSON")
    return made


def _count(text: str) -> int:
    if not is_digits(text) or not 0 < int(text) <= 10_000:
        raise ValueError(f"{text!r} is not a number from 1 to 10000")
    return int(text)


def main(argv: list[str]) -> int:
    told = parser().parse_args(argv)
    folder = _folder(told.run, layout.runs_root(told.runs_dir, os.environ))
    with parsing(folder):
        found = summary(one for one in read_rollouts(folder) if told.step is None or one.step == told.step)
        if not found.answers:
            of_step = "" if told.step is None else f" of step {told.step}"
            raise Refusal(f"{os.path.join(folder, layout.ROLLOUTS)} has no answers{of_step} yet", EX_NOINPUT)
        if told.json:
            print_json(_as_json(found, told.most))
        else:
            _print(found, told.most)
    return 0


def _folder(where: str | None, root: str) -> str:
    where = None if where is None else run_index.through_latest(where)
    if where is not None and os.path.exists(os.path.join(where, layout.ROLLOUTS)):
        return where
    found = run_index.find_run(where, root).dir
    path = run_index.find_file(found, layout.ROLLOUTS)
    return found if path is None else os.path.dirname(os.path.join(found, path))


def best(rollouts: Iterable[Rollout], most: int, *, worst: bool = False) -> list[Rollout]:
    """No answer twice to the same prompt; the newest first among equals."""
    ordered = sorted(rollouts, key=lambda one: (one.reward if worst else -one.reward, -one.step))
    kept: dict[tuple[int, str], Rollout] = {}
    for one in ordered:
        kept.setdefault((one.row, one.answer), one)
        if len(kept) == most:
            break
    return list(kept.values())


def chosen(changes: tuple[PromptChange, ...], most: int) -> tuple[list[PromptChange], list[PromptChange]]:
    """(most gained, most lost)."""
    lost = [change for change in reversed(changes) if change.gain < 0]
    return [change for change in changes if change.gain >= 0][:most], lost[:most]


def _as_json(found: RolloutsSummary, most: int) -> dict[str, Any]:
    gained, lost = chosen(found.changes, most)
    return {
        "schema": 1,
        "answers": found.answers,
        "steps": [found.steps[0], found.steps[-1], len(found.steps)],
        "reward_first": mean(found.first),
        "reward_last": mean(found.last),
        "best": [to_json(one) for one in best(found.last, most)],
        "worst": [to_json(one) for one in best(found.last, most, worst=True)],
        "changed": [{"row": one.row, "gain": one.gain, "before": to_json(typical(one.before)), "after": to_json(typical(one.after))} for one in (*gained, *lost)],
    }  # fmt: skip


def _print(found: RolloutsSummary, most: int) -> None:
    first, last = found.steps[0], found.steps[-1]
    print(f"{plural(found.answers, 'answer')} of {len(found.steps)} steps, {first} to {last}")
    if len(found.steps) <= ENDS:
        print(f"mean reward {mean(found.last):.3f}")
    else:
        print(
            f"mean reward {mean(found.first):.3f} in the first {ENDS} steps, {mean(found.last):.3f} in the last {ENDS}"
        )
    if any(one.correct is not None for one in found.last):
        print_text("correct or wrong: as `stoker train evaluate` grades the answer, whatever the reward pays for")
    for title, some in (("Best", best(found.last, most)), ("Worst", best(found.last, most, worst=True))):
        print(f"\n{title}:")
        for one in some:
            print_text(f"  {_about(one)}")
            print_text(f"    prompt: {_shown(one.prompt)}\n    answer: {_shown(one.answer)}")
    gained, lost = chosen(found.changes, most)
    print_text(
        "\nWhat changed for the same prompt:"
        if found.changes
        else "\nNo prompt occurs in two of these steps, so there is no change to show."
    )
    for change in (*gained, *lost):
        before, after = typical(change.before), typical(change.after)
        print_text(f"  {change.gain:+.3f}  prompt: {_shown(change.before[0].prompt)}")
        for one, group in ((before, change.before), (after, change.after)):
            print_text(f"    step {one.step}, mean reward {mean(group):.3f}: {_shown(one.answer)}")


def _about(one: Rollout) -> str:
    some = list(one.parts.items())[:_PARTS]
    parts = ", ".join(f"{escape(name, 60)} {value:g}" for name, value in some)
    marks = [f"step {one.step}", f"{one.tokens} tokens"]
    if one.correct is not None:
        marks.append("correct" if one.correct else "wrong")
    marks += ["cut at the token limit"] if one.cut else []
    return f"{one.reward:.3f}" + (f" ({parts})" if len(one.parts) > 1 else "") + f"  {', '.join(marks)}"


def _shown(text: Any) -> str:
    """One line of a text from anywhere, without secrets and control codes."""
    if isinstance(text, list) and text and isinstance(text[-1], dict):
        text = text[-1].get("content")  # of messages, what was asked last
    words = text if isinstance(text, str) else json.dumps(text)
    return escape(words[: 4 * _TEXT].replace("\n", " ⏎ "), _TEXT)
