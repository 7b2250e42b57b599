"""`stoker rollouts [RUN] [--most N] [--step N]`: shows the best and worst completions of a GRPO run, and what changed."""

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
    find_typical_rollout,
    mean_reward,
    read_rollouts,
    summarize,
    to_json,
)

_DESCRIPTION = (
    "Shows the best and worst completions of a GRPO run's last steps, and what changed since its first steps."
)
_MAX_PARTS = 20  # shown parts of a reward
_MAX_TEXT = 300  # shown characters of a prompt or a completion


def build_parser() -> OptionParser:
    parser = OptionParser("stoker rollouts", _DESCRIPTION)
    parser.run_argument()
    parser.option("--most", "N", "how many completions of each kind (default: 3)", _parse_count, default=3)
    parser.option("--step", "N", "only the completions of this step", int)
    parser.runs_dir()
    parser.switch("--json", "print the summary as JSON")
    return parser


def _parse_count(text: str) -> int:
    if not is_digits(text) or not 0 < int(text) <= 10_000:
        raise ValueError(f"{text!r} is not a whole number from 1 to 10000")
    return int(text)


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    folder = _find_rollouts(args.run, layout.runs_root(args.runs_dir, os.environ))
    with parsing(folder):
        rollouts = summarize(
            rollout for rollout in read_rollouts(folder) if args.step is None or rollout.step == args.step
        )
        if not rollouts.answers:
            of_step = "" if args.step is None else f" of step {args.step}"
            raise Refusal(f"{os.path.join(folder, layout.ROLLOUTS)} has no completions{of_step} yet", EX_NOINPUT)
        if args.json:
            print_json(_summary_to_json(rollouts, args.most))
        else:
            _print_summary(rollouts, args.most)
    return 0


def _find_rollouts(name: str | None, root: str) -> str:
    """Return the folder that holds the rollouts of a run: the run's, or that of the role that has them."""
    path = None if name is None else run_index.through_latest(name)
    if path is not None and os.path.exists(os.path.join(path, layout.ROLLOUTS)):
        return path
    run_dir = run_index.find_run(path, root).dir
    file = run_index.find_file(run_dir, layout.ROLLOUTS)
    return run_dir if file is None else os.path.dirname(os.path.join(run_dir, file))


def select_best(rollouts: Iterable[Rollout], limit: int, *, worst: bool = False) -> list[Rollout]:
    """Return the rollouts with the highest (or lowest) reward, with each completion of a prompt once and the newest first."""
    ordered = sorted(rollouts, key=lambda rollout: (rollout.reward if worst else -rollout.reward, -rollout.step))
    chosen: dict[tuple[int, str], Rollout] = {}
    for rollout in ordered:
        chosen.setdefault((rollout.row, rollout.answer), rollout)
        if len(chosen) == limit:
            break
    return list(chosen.values())


def select_largest_changes(changes: tuple[PromptChange, ...], limit: int) -> list[PromptChange]:
    """Return the prompts whose reward rose most, then those whose reward fell most."""
    risen = [change for change in changes if change.gain >= 0]
    fallen = [change for change in reversed(changes) if change.gain < 0]
    return [*risen[:limit], *fallen[:limit]]


def _summary_to_json(rollouts: RolloutsSummary, limit: int) -> dict[str, Any]:
    return {
        "schema": 1,
        "answers": rollouts.answers,
        "steps": [rollouts.steps[0], rollouts.steps[-1], len(rollouts.steps)],
        "reward_first": mean_reward(rollouts.first),
        "reward_last": mean_reward(rollouts.last),
        "best": [to_json(rollout) for rollout in select_best(rollouts.last, limit)],
        "worst": [to_json(rollout) for rollout in select_best(rollouts.last, limit, worst=True)],
        "changed": [
            {
                "row": change.row,
                "gain": change.gain,
                "before": to_json(find_typical_rollout(change.before)),
                "after": to_json(find_typical_rollout(change.after)),
            }
            for change in select_largest_changes(rollouts.changes, limit)
        ],
    }


def _print_summary(rollouts: RolloutsSummary, limit: int) -> None:
    steps = rollouts.steps
    print(f"{plural(rollouts.answers, 'completion')} of {plural(len(steps), 'step')}, {steps[0]} to {steps[-1]}")
    if len(steps) <= ENDS:
        print(f"mean reward {mean_reward(rollouts.last):.3f}")
    else:
        first, last = mean_reward(rollouts.first), mean_reward(rollouts.last)
        print(f"mean reward {first:.3f} in the first {ENDS} steps, {last:.3f} in the last {ENDS}")
    if any(rollout.correct is not None for rollout in rollouts.last):
        print_text("the grades correct and wrong are those of `stoker train evaluate`, independent of the reward")
    for title, chosen in (
        ("Best", select_best(rollouts.last, limit)),
        ("Worst", select_best(rollouts.last, limit, worst=True)),
    ):
        print(f"\n{title}:")
        for rollout in chosen:
            print_text(f"  {_format_rollout(rollout)}")
            print_text(f"    prompt: {_format_text(rollout.prompt)}\n    completion: {_format_text(rollout.answer)}")
    print_text(
        "\nWhat changed for the same prompt:"
        if rollouts.changes
        else "\nNo prompt occurs in two of these steps, so there is no change to show."
    )
    for change in select_largest_changes(rollouts.changes, limit):
        print_text(f"  {change.gain:+.3f}  prompt: {_format_text(change.before[0].prompt)}")
        for group in (change.before, change.after):
            rollout = find_typical_rollout(group)
            print_text(f"    step {rollout.step}, mean reward {mean_reward(group):.3f}: {_format_text(rollout.answer)}")


def _format_rollout(rollout: Rollout) -> str:
    """Format the reward of a rollout with its parts, then its step, length and grade."""
    parts = ", ".join(f"{escape(name, 60)} {value:g}" for name, value in list(rollout.parts.items())[:_MAX_PARTS])
    notes = [f"step {rollout.step}", plural(rollout.tokens, "token")]
    if rollout.correct is not None:
        notes.append("correct" if rollout.correct else "wrong")
    if rollout.cut:
        notes.append("truncated at the token limit")
    return f"{rollout.reward:.3f}" + (f" ({parts})" if len(rollout.parts) > 1 else "") + f"  {', '.join(notes)}"


def _format_text(text: Any) -> str:
    """Format a prompt or completion, or the last message of a conversation, as one line without control codes."""
    if isinstance(text, list) and text and isinstance(text[-1], dict):
        text = text[-1].get("content")
    line = text if isinstance(text, str) else json.dumps(text)
    return escape(line[: 4 * _MAX_TEXT].replace("\n", " ⏎ "), _MAX_TEXT)
