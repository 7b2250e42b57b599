"""A step's answers become rewards: the built-in parts here, the user's own in a process beside the rank. No torch."""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import stoker
from stoker.contract.errors import EX_DATAERR, Refusal
from stoker.contract.frozen import frozen
from stoker.contract.text import escape
from stoker.control.record.rollouts_log import Rollout, RolloutsWriter
from stoker.training.evaluate.grading import Grader, open_question
from stoker.training.rl.last_position import PositionFile, described
from stoker.training.rl.parts import (
    CODE,
    FORMAT,
    FORMATS,
    LENGTH,
    MARKERS,
    MODEL,
    ROLLOUT,
    RewardPart,
    length_reward,
    shown,
)
from stoker.training.rl.reward_worker import Call

GRACE_S = 10.0  # beyond the time limit: code that no alarm reaches
WARM_UP_S = 120.0  # more for the start: a file may import torch and load a model
LONGEST = 1200  # characters of a line
# (what was asked, the answer's text) of each, to scores
Scorer = Callable[[Sequence[tuple[Any, str]]], list[float]]


class RewardFailed(Exception):
    """One line: whose reward, where and why."""


@frozen
class Judged:
    """Of this rank's answers, in their order. NaN: a reward does not apply to an answer; as the sum: none does."""

    rewards: list[float]
    correct: list[bool | None]  # as evaluation grades them, whatever the reward pays for; None: the row has no answer
    parts: list[list[float]]  # of each part, before its weight


class Worker:
    """The process of the parts that run apart. It ends with this one."""

    def __init__(self, parts: Sequence[RewardPart], columns: Sequence[str], seconds: float) -> None:
        """Raises Refusal where a file can't be loaded: before anything is trained."""
        self._parts, self._seconds, self._rest = list(parts), seconds, b""
        self._position, self._call = PositionFile(), Call({"completions": [], "prompts": [], "rows": [], "of": []})
        root = os.path.dirname(os.path.dirname(os.path.abspath(stoker.__file__)))
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "stoker.training.rl.reward_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
            bufsize=0,
            pass_fds=(self._position.descriptor,),
        )
        limits = {"seconds": seconds, "loading_seconds": WARM_UP_S, "position": self._position.descriptor}
        try:
            self._send({"functions": [_told(part) for part in parts], "columns": list(columns), **limits})
            self._receive(WARM_UP_S)
        except RewardFailed as problem:
            self.close()
            raise Refusal(f"grpo.{problem}", EX_DATAERR) from None

    def __call__(self, part: RewardPart, call: dict[str, Any], count: int) -> list[float]:
        """Return a reward for each answer, NaN where this one does not apply."""
        self._call = Call(call)
        self._send({"function": self._parts.index(part), **call})
        made = self._receive()
        assert isinstance(made, list) and len(made) == count, "the worker has counted"
        return [math.nan if value is None else float(value) for value in made]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._position.close()

    def _send(self, told: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        data = memoryview(json.dumps(told, default=str).encode() + b"\n")
        try:
            while data:
                data = data[os.write(self._process.stdin.fileno(), data) :]
        except BrokenPipeError:
            raise self._died() from None

    def _receive(self, more: float = 0.0) -> Any:
        assert self._process.stdout is not None
        pipe, deadline = self._process.stdout.fileno(), time.monotonic() + self._seconds + more + GRACE_S
        pieces, ready = [self._rest], select.poll()  # poll, not select: a rank may have more than 1,024 files open
        ready.register(pipe, select.POLLIN | select.POLLHUP)
        while b"\n" not in pieces[-1]:
            left = deadline - time.monotonic()
            if left <= 0 or not ready.poll(1000 * left):
                names = ", ".join(shown(part) for part in self._parts)
                raise RewardFailed(
                    f"reward {names} failed: no answer within {self._seconds:g} s; make it faster, or raise grpo.reward_timeout"
                )
            piece = os.read(pipe, 1 << 20)
            if not piece:
                raise self._died()
            pieces.append(piece)
        line, _, self._rest = b"".join(pieces).partition(b"\n")
        told = json.loads(line)
        if "failed" in told:
            raise RewardFailed(escape(str(told["failed"]), LONGEST))
        return told["made"]

    def _died(self) -> RewardFailed:
        try:
            code = self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:  # it closed its end, and goes on
            self._process.kill()
            code = self._process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        if code == -signal.SIGKILL:
            how += " (out of memory?)"
        position = self._position.read()
        name, line = described(position, [shown(part) for part in self._parts])
        about, count = "", len(self._call.completions)
        if position is not None and count:
            few = f"one of {count} answers at once, the first: " if position.item is None else ""
            about = f"; {few}{self._call.about(position.item or 0)}"
        return RewardFailed(
            escape(f"reward {name} failed: {line}its process {how}{about}; what it printed is in the log", LONGEST)
        )


def _told(part: RewardPart) -> dict[str, str]:
    if part.kind == CODE:
        return {"name": shown(part), "file": os.path.abspath(part.file), "function": part.argument}
    return {"name": shown(part), "pattern": part.argument}


class Rewards:
    """What a step's answers are worth. `rows`: of the prompts' file, which a user's function may look at."""

    def __init__(
        self, parts: Sequence[RewardPart], rows: Sequence[Mapping[str, Any]], new_tokens: int, worker: Worker | None,
        scorer: Scorer | None,
    ) -> None:  # fmt: skip
        self.parts, self._rows, self._new_tokens = tuple(parts), rows, new_tokens
        self._worker, self._scorer = worker, scorer
        self._grader = Grader(question for row in rows if (question := open_question(row)) is not None)

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(part.label for part in self.parts)

    def __call__(self, answers: Sequence[Any]) -> Judged:
        """`answers`: of rl/rollout.py. Raises RewardFailed. Those that failed have no reward."""
        whole = [answer for answer in answers if not getattr(answer, "failed", "")]
        call = self._call(whole) if self._worker is not None and whole else {}
        found = [self._part(part, whole, call) for part in self.parts]
        rewards = [
            weighted_sum([(part.weight, values[number]) for part, values in zip(self.parts, found, strict=True)])
            for number in range(len(whole))
        ]
        correct = [self._grade(answer) for answer in whole]
        if len(whole) == len(answers):
            return Judged(rewards, correct, found)
        places = [number for number, answer in enumerate(answers) if not getattr(answer, "failed", "")]
        made = Judged([math.nan] * len(answers), [None] * len(answers), [[math.nan] * len(answers) for _ in found])
        for number, place in enumerate(places):
            made.rewards[place], made.correct[place] = rewards[number], correct[number]
            for part, values in zip(made.parts, found, strict=True):
                part[place] = values[number]
        return made

    def _grade(self, answer: Any) -> bool | None:
        question = open_question(self._rows[answer.prompt.row])
        return None if question is None else self._grader(answer.text, question, truncated=not answer.whole)

    def _part(self, part: RewardPart, answers: Sequence[Any], call: dict[str, Any]) -> list[float]:
        if not answers:
            return []
        if part.apart:
            assert self._worker is not None, "there is one wherever a part runs apart"
            return self._worker(part, call, len(answers))
        if part.kind == MODEL:
            assert self._scorer is not None, "there is one where the settings name its folder"
            return above_the_mean(answers, self._scorer)
        if part.kind == ROLLOUT:
            return [math.nan if answer.reward is None else answer.reward for answer in answers]
        if part.kind == LENGTH:
            return [length_reward(tokens_of(answer), part.argument, self._new_tokens) for answer in answers]
        if part.kind == FORMAT:
            return [float(FORMATS[part.argument](answer.text)) for answer in answers]
        mark = MARKERS[part.kind]
        return [float(mark(answer.text, answer.prompt.answer, not answer.whole)) for answer in answers]

    def _call(self, answers: Sequence[Any]) -> dict[str, Any]:
        """Each prompt and row once, however many answers it has."""
        places: dict[int, int] = {}
        prompts, rows = [], []
        for answer in answers:
            if answer.prompt.row not in places:
                places[answer.prompt.row] = len(places)
                prompts.append(answer.prompt.asked)
                rows.append(dict(self._rows[answer.prompt.row]))
        of = [places[answer.prompt.row] for answer in answers]
        return {"prompts": prompts, "rows": rows, "of": of, "completions": list(map(completion_of, answers))}


def completion_of(answer: Any) -> Any:
    """Return what a reward function gets: messages where the prompt is messages, else the text."""
    if not isinstance(answer.prompt.asked, list):
        return answer.text
    return list(getattr(answer, "messages", ())) or [{"role": "assistant", "content": answer.text}]


def tokens_of(answer: Any) -> int:
    """Return how many tokens of an answer the policy wrote."""
    return sum(getattr(answer, "learn", ())) or len(answer.ids)


def weighted_sum(terms: Sequence[tuple[float, float]]) -> float:
    """Return the sum of weight × value over the values that are no NaN; NaN if all are."""
    total: float | None = None
    for weight, value in terms:
        if not math.isnan(value):
            total = weight * value if total is None else total + weight * value
    return math.nan if total is None else total


class RolloutLog:
    """rollouts.jsonl, where it is wanted. A disk that is full ends the file, not the run."""

    def __init__(self, folder: str, resumed_at: int, megabytes: int, say: Callable[[str], None]) -> None:
        self._say = say
        self._file: RolloutsWriter | None = None
        if megabytes:
            self._try(lambda: self._open(RolloutsWriter(folder, resumed_at, megabytes << 20)))

    def __call__(
        self, step: int, weights: Callable[[Any], int], answers: Sequence[Any], judged: Judged, labels: Sequence[str]
    ) -> None:
        """`weights`: updates behind those that began an answer."""
        file = self._file
        if file is not None:
            made = (
                Rollout(
                    step, weights(answer), answer.prompt.row, answer.prompt.asked, answer.transcript or answer.text,
                    judged.rewards[number], answer.parts | _known_parts(labels, judged, number),
                    judged.correct[number], tokens_of(answer), not answer.whole,
                )
                for number, answer in enumerate(answers)
                if not math.isnan(judged.rewards[number])
            )  # fmt: skip
            self._try(lambda: file.write(made))

    def _open(self, file: RolloutsWriter) -> None:
        self._file = file

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except (OSError, ValueError) as problem:
            self._file = None
            self._say(f"rollouts.jsonl can't be written: {problem}; the run continues without it")


def _known_parts(labels: Sequence[str], judged: Judged, number: int) -> dict[str, float]:
    values = {label: part[number] for label, part in zip(labels, judged.parts, strict=True)}
    return {label: value for label, value in values.items() if not math.isnan(value)}


def columns_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a function can ask for. One that gets all answers at once has a list for each."""
    return list(dict.fromkeys(name for row in rows for name in row))


def above_the_mean(answers: Sequence[Any], scorer: Scorer) -> list[float]:
    """A reward model's score counts by how far it is above the mean of its prompt's, squeezed to 0 … 1."""
    scores = scorer([(answer.prompt.asked, answer.text) for answer in answers])
    of_prompt: dict[int, list[float]] = {}
    for answer, score in zip(answers, scores, strict=True):
        of_prompt.setdefault(answer.prompt.row, []).append(score)
    means = {row: sum(some) / len(some) for row, some in of_prompt.items()}
    return [_sigmoid(score - means[answer.prompt.row]) for answer, score in zip(answers, scores, strict=True)]


def _sigmoid(score: float) -> float:
    return 1 / (1 + math.exp(-score)) if score >= 0 else math.exp(score) / (1 + math.exp(score))
