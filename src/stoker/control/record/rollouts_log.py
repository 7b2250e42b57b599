"""rollouts.jsonl: what GRPO asked, what was answered, and what that was worth. Rank 0 writes its own answers, a line each.

The file is bounded. Where it passes its limit it is thinned: of the steps between the first five and the last five it keeps
every second, then every fourth, and so on, so that the whole run stays in it.
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

ENDS = 5  # steps at both ends that are never thinned
OF_A_STEP = 16  # a step has no more than this part of the limit: those at both ends always fit
# Longer prompts and answers are cut when they are written, so that a viewer finds whole lines in the last MAX_LINE bytes.
MAX_TEXT = 1 << 17  # characters of a prompt or an answer
MAX_LINE = 4 << 20  # bytes of a line


@frozen
class Rollout:
    step: int
    weights: int  # updates behind the weights that wrote it
    row: int  # of the prompts' file, from 0
    prompt: Any  # a text, or messages
    answer: str
    reward: float
    parts: dict[str, float]  # before their weights
    correct: bool | None  # as `stoker train evaluate` grades it; None: the row has no answer, or the file no such grade
    tokens: int
    cut: bool  # at the token limit


def to_json(rollout: Rollout) -> dict[str, Any]:
    """Return the line's keys. `right` is an older name of `correct`, kept for programs that read it."""
    return {**as_json(rollout), "right": rollout.correct}


class RolloutsWriter:
    def __init__(self, run_dir: str, resumed_at: int, limit: int) -> None:
        """`resumed_at`: lines of that step and later are of an attempt that was lost. `limit`: bytes."""
        self._path, self._limit = os.path.join(run_dir, layout.ROLLOUTS), limit
        if os.path.exists(self._path):
            kept = [line for step, line in self._lines() if step < resumed_at]
            write_atomic(self._path, "".join(kept), durable=False)
        self._handle = os.open(self._path, APPEND, 0o600)

    def write(self, rollouts: Iterable[Rollout]) -> None:
        """One step's."""
        lines, size = [], 0
        for rollout in rollouts:
            line = _line(rollout)
            size += len(line)
            if size > self._limit // OF_A_STEP:
                break
            lines.append(line)
        data = memoryview(b"".join(lines))
        while data:
            data = data[os.write(self._handle, data) :]
        if os.fstat(self._handle).st_size > self._limit:
            self._thin()

    def close(self) -> None:
        os.close(self._handle)

    def _lines(self) -> Iterator[tuple[int, str]]:
        for line, told in read_json_lines(self._path):
            if line.endswith("\n") and isinstance(told.get("step"), int):
                yield told["step"], line

    def _thin(self) -> None:
        of_step: dict[int, list[str]] = {}
        for step, line in self._lines():
            of_step.setdefault(step, []).append(line)
        steps = sorted(of_step)
        size = {step: sum(map(len, lines)) for step, lines in of_step.items()}
        first, between, last = steps[:ENDS], steps[ENDS:-ENDS], steps[-ENDS:] if len(steps) > ENDS else []
        every = 1  # evenly over the run: what is left of 8 is among what is left of 4
        while between and sum(size[step] for step in (*first, *between, *last)) > 3 * self._limit // 4:
            every *= 2
            between = [step for step in between if step % every == 0]
        write_atomic(self._path, "".join("".join(of_step[step]) for step in (*first, *between, *last)), durable=False)
        os.close(self._handle)
        self._handle = os.open(self._path, APPEND, 0o600)


def _line(rollout: Rollout) -> bytes:
    told = {"schema": layout.SCHEMA, **to_json(rollout), "answer": rollout.answer[:MAX_TEXT]}
    if isinstance(rollout.prompt, str):
        told["prompt"] = rollout.prompt[:MAX_TEXT]
    line = json.dumps(told, default=str).encode() + b"\n"
    if len(line) > MAX_LINE:
        told["prompt"] = "…"
        line = json.dumps(told, default=str).encode() + b"\n"
    return line


def read_rollouts(folder: str) -> Iterator[Rollout]:
    """Yield the rollouts in the file's order; a torn line is left out. Raises Refusal if there is no file or it can't be read."""
    path = os.path.join(folder, layout.ROLLOUTS)
    if not os.path.exists(path):
        line = f"no {layout.ROLLOUTS} in {folder}: stage grpo writes it, unless grpo.rollouts_mb is 0"
        raise Refusal(line, EX_NOINPUT)
    try:
        for _, values in read_json_lines(path):
            rollout = parse_rollout(values)
            if rollout is not None:
                yield rollout
    except OSError as problem:
        raise unreadable(path, problem) from problem


def parse_rollout(told: dict[str, Any]) -> Rollout | None:
    """Return a line of the file as a rollout, or None if a field is missing or of another type."""
    numbers = [told.get(name) for name in ("step", "weights", "row", "tokens")]
    if any(isinstance(number, bool) or not isinstance(number, int) for number in numbers):
        return None
    reward, parts = told.get("reward"), told.get("parts")
    if reward is None or not _is_number(reward) or not isinstance(told.get("answer"), str):
        return None
    kept = parts if isinstance(parts, dict) else {}
    values = {name: float(value) for name, value in kept.items() if _is_number(value)}
    step, weights, row, tokens = numbers
    about = (told.get("prompt"), told["answer"], float(reward), values, _correct(told))
    return Rollout(step, weights, row, *about, tokens, bool(told.get("cut")))  # type: ignore[arg-type]


def _correct(line: dict[str, Any]) -> bool | None:
    """Return the recorded grade.

    Files written before there was `correct` only say whether the reward's stricter rule was met: where it was, the answer
    is correct; where it was not, nothing is known.
    """
    if "correct" not in line:
        return True if line.get("right") is True else None
    correct = line["correct"]
    return correct if isinstance(correct, bool) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@frozen
class Change:
    """One prompt, asked in two steps."""

    row: int
    before: tuple[Rollout, ...]
    after: tuple[Rollout, ...]

    @property
    def gain(self) -> float:
        return mean(self.after) - mean(self.before)


@frozen
class Summary:
    answers: int
    steps: tuple[int, ...]
    first: tuple[Rollout, ...]  # of the first ENDS steps
    last: tuple[Rollout, ...]  # of the last ENDS
    changes: tuple[Change, ...]  # the largest gain first; empty: no prompt was asked twice


def summary(rollouts: Iterable[Rollout]) -> Summary:
    of_prompt: dict[int, dict[int, list[Rollout]]] = {}
    of_step: dict[int, list[Rollout]] = {}
    count = 0
    for one in rollouts:
        count += 1
        of_step.setdefault(one.step, []).append(one)
        of_prompt.setdefault(one.row, {}).setdefault(one.step, []).append(one)
    steps = sorted(of_step)
    changes = []
    for row, asked in of_prompt.items():
        if len(asked) > 1:
            changes.append(Change(row, tuple(asked[min(asked)]), tuple(asked[max(asked)])))
    changes.sort(key=lambda change: -change.gain)
    first, last = ([one for step in some for one in of_step[step]] for some in (steps[:ENDS], steps[-ENDS:]))
    return Summary(count, tuple(steps), tuple(first), tuple(last), tuple(changes))


def mean(rollouts: Iterable[Rollout]) -> float:
    rewards = [one.reward for one in rollouts]
    return sum(rewards) / len(rewards) if rewards else 0.0


def typical(rollouts: tuple[Rollout, ...]) -> Rollout:
    """The one whose reward is nearest to the mean."""
    middle = mean(rollouts)
    return min(rollouts, key=lambda one: abs(one.reward - middle))
