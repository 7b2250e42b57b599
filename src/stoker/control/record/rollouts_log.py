"""Writes and reads rollouts.jsonl: GRPO's prompts, completions and rewards. Rank 0 writes its own rollouts, one per line.

The file is bounded. When it exceeds its limit, every second step between the first five and the last five is dropped, then
three of four, and so on, so that the file always covers the whole run.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from typing import Any

from stoker.contract import layout
from stoker.contract.errors import EX_NOINPUT, Refusal, unreadable
from stoker.contract.frozen import as_json, frozen
from stoker.contract.safe_io import APPEND, read_json_lines, write_atomic

ENDS = 5  # steps at each end that are never dropped
STEPS_PER_LIMIT = 16  # a step gets at most 1/16 of the limit, so that the 2 * ENDS steps at both ends always fit
# Longer prompts and completions are cut, so that a viewer finds complete lines in the last MAX_LINE bytes.
MAX_TEXT = 1 << 17  # characters of a prompt or a completion
MAX_LINE = 4 << 20  # bytes of a line


# The names of the fields are keys of the file.
@frozen
class Rollout:
    step: int
    weights: int  # optimizer steps behind the weights that generated it
    row: int  # in the prompts' file, from 0
    prompt: Any  # a text, or messages
    answer: str  # the completion
    reward: float
    parts: dict[str, float]  # rewards before their weights
    # As `stoker train evaluate` grades it. None if there is no reference answer, or the file is old and has no grades.
    correct: bool | None
    tokens: int
    cut: bool  # truncated at the token limit


def to_json(rollout: Rollout) -> dict[str, Any]:
    """Return the line's keys. `right` is the former name of `correct`, kept for programs that read it."""
    return {**as_json(rollout), "right": rollout.correct}


class RolloutsWriter:
    """Appends rollouts up to `limit` bytes. Lines of step `resumed_at` and later are removed first: they are written again."""

    def __init__(self, run_dir: str, resumed_at: int, limit: int) -> None:
        self._path, self._limit = os.path.join(run_dir, layout.ROLLOUTS), limit
        if os.path.exists(self._path):
            lines = [line for step, line in self._read_lines() if step < resumed_at]
            write_atomic(self._path, "".join(lines), durable=False)
        self._fd = os.open(self._path, APPEND, 0o600)

    def write(self, rollouts: Iterable[Rollout]) -> None:
        """Write one step's rollouts, as many as fit into its share of the limit."""
        lines, size = [], 0
        for rollout in rollouts:
            line = _format_line(rollout)
            size += len(line)
            if size > self._limit // STEPS_PER_LIMIT:
                break
            lines.append(line)
        data = memoryview(b"".join(lines))
        while data:
            data = data[os.write(self._fd, data) :]
        if os.fstat(self._fd).st_size > self._limit:
            self._drop_steps()

    def close(self) -> None:
        os.close(self._fd)

    def _read_lines(self) -> Iterator[tuple[int, str]]:
        """Yield (step, line) of the complete lines."""
        for line, values in read_json_lines(self._path):
            if line.endswith("\n") and isinstance(values.get("step"), int):
                yield values["step"], line

    def _drop_steps(self) -> None:
        lines_by_step: dict[int, list[str]] = {}
        for step, line in self._read_lines():
            lines_by_step.setdefault(step, []).append(line)
        steps = sorted(lines_by_step)
        size = {step: sum(map(len, lines)) for step, lines in lines_by_step.items()}
        first, between, last = steps[:ENDS], steps[ENDS:-ENDS], steps[-ENDS:] if len(steps) > ENDS else []
        interval = 1  # doubled each time: the steps that an interval of 8 keeps are among those that 4 keeps
        while between and sum(size[step] for step in (*first, *between, *last)) > 3 * self._limit // 4:
            interval *= 2
            between = [step for step in between if step % interval == 0]
        text = "".join(line for step in (*first, *between, *last) for line in lines_by_step[step])
        write_atomic(self._path, text, durable=False)
        os.close(self._fd)
        self._fd = os.open(self._path, APPEND, 0o600)


def _format_line(rollout: Rollout) -> bytes:
    values = {"schema": layout.SCHEMA, **to_json(rollout), "answer": rollout.answer[:MAX_TEXT]}
    if isinstance(rollout.prompt, str):
        values["prompt"] = rollout.prompt[:MAX_TEXT]
    line = json.dumps(values, default=str).encode() + b"\n"
    if len(line) > MAX_LINE:
        values["prompt"] = "…"
        line = json.dumps(values, default=str).encode() + b"\n"
    return line


def read_rollouts(run_dir: str) -> Iterator[Rollout]:
    """Yield the rollouts in file order, without incomplete lines. Raises Refusal if there is no file."""
    path = os.path.join(run_dir, layout.ROLLOUTS)
    if not os.path.exists(path):
        line = f"{run_dir} has no {layout.ROLLOUTS}; only stage grpo writes it, unless grpo.rollouts_mb is 0"
        raise Refusal(line, EX_NOINPUT)
    try:
        for _, values in read_json_lines(path):
            rollout = parse_rollout(values)
            if rollout is not None:
                yield rollout
    except OSError as problem:
        raise unreadable(path, problem) from problem


def parse_rollout(values: dict[str, Any]) -> Rollout | None:
    """Return a line of the file as a rollout, or None if a field is missing or of another type."""
    numbers: list[Any] = [values.get(name) for name in ("step", "weights", "row", "tokens")]
    if any(isinstance(number, bool) or not isinstance(number, int) for number in numbers):
        return None
    reward, completion, parts = values.get("reward"), values.get("answer"), values.get("parts")
    if reward is None or not _is_number(reward) or not isinstance(completion, str):
        return None
    rewards = (
        {name: float(value) for name, value in parts.items() if _is_number(value)} if isinstance(parts, dict) else {}
    )
    if "correct" in values:
        correct = values["correct"] if isinstance(values["correct"], bool) else None
    else:
        # Older files only tell whether the reward's stricter rule was met. If it was not, the answer may still be correct.
        correct = True if values.get("right") is True else None
    step, weights, row, tokens = numbers
    prompt, cut = values.get("prompt"), bool(values.get("cut"))
    return Rollout(step, weights, row, prompt, completion, float(reward), rewards, correct, tokens, cut)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@frozen
class PromptChange:
    """The rollouts of one prompt in the first and in the last step that used it."""

    row: int
    before: tuple[Rollout, ...]
    after: tuple[Rollout, ...]

    @property
    def gain(self) -> float:
        return mean_reward(self.after) - mean_reward(self.before)


@frozen
class RolloutsSummary:
    answers: int
    steps: tuple[int, ...]
    first: tuple[Rollout, ...]  # of the first ENDS steps
    last: tuple[Rollout, ...]  # of the last ENDS steps
    changes: tuple[PromptChange, ...]  # of prompts that were used in two steps, largest gain first


def summarize(rollouts: Iterable[Rollout]) -> RolloutsSummary:
    """Summarize a run's rollouts by step and by prompt."""
    by_prompt: dict[int, dict[int, list[Rollout]]] = {}
    by_step: dict[int, list[Rollout]] = {}
    count = 0
    for rollout in rollouts:
        count += 1
        by_step.setdefault(rollout.step, []).append(rollout)
        by_prompt.setdefault(rollout.row, {}).setdefault(rollout.step, []).append(rollout)
    changes = [
        PromptChange(row, tuple(of_step[min(of_step)]), tuple(of_step[max(of_step)]))
        for row, of_step in by_prompt.items()
        if len(of_step) > 1
    ]
    changes.sort(key=lambda change: -change.gain)
    steps = sorted(by_step)
    first = tuple(rollout for step in steps[:ENDS] for rollout in by_step[step])
    last = tuple(rollout for step in steps[-ENDS:] for rollout in by_step[step])
    return RolloutsSummary(count, tuple(steps), first, last, tuple(changes))


def mean_reward(rollouts: Iterable[Rollout]) -> float:
    """Return the mean reward, or 0 without rollouts."""
    rewards = [rollout.reward for rollout in rollouts]
    return sum(rewards) / len(rewards) if rewards else 0.0


def find_typical_rollout(rollouts: tuple[Rollout, ...]) -> Rollout:
    """Return the rollout whose reward is nearest to the mean."""
    middle = mean_reward(rollouts)
    return min(rollouts, key=lambda rollout: abs(rollout.reward - middle))
