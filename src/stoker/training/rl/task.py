"""GRPO in the training loop: a step's numbers, the breaker, and what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import stoker
from stoker.contract.names import EX_CONFIG, Refusal
from stoker.contract.shape import as_json, shape
from stoker.training.checkpoint.reading import Checkpoint
from stoker.training.loop.run import Answers, Task, Words, agree
from stoker.training.loop.say import Voice
from stoker.training.loop.speed import Speed
from stoker.training.parallel.group import Group
from stoker.training.rl.breaker import FIRST, Finding, History, Seen, Stopped
from stoker.training.rl.config import GrpoConfig
from stoker.training.rl.rollout import Outcome
from stoker.training.rl.update import Learned

STAGE = "grpo"


@shape
class Position:
    step: int = 0  # steps that are done
    updates: int = 0  # optimizer steps that counted
    tokens: int = 0  # of answers so far


def resumed(found: Checkpoint | None, optimizer: str, c: GrpoConfig) -> tuple[Position, History]:
    """Where a checkpoint left it, if there is one: the step, and the numbers the breaker looks back at."""
    if found is None:
        return Position(), History(c)
    meta = found.meta
    if meta.get("stage") != STAGE:
        raise Refusal(
            f"checkpoint {found.path} is of stage {meta.get('stage', 'pretrain')}, not {STAGE}: name its model with"
            " model.load instead",
            EX_CONFIG,
        )
    if meta.get("optimizer") != optimizer:
        raise Refusal(
            f"checkpoint {found.path} has the state of optim.kind {meta.get('optimizer')}, not {optimizer}", EX_CONFIG
        )
    return Position(int(meta["step"]), int(meta["updates"]), int(meta["tokens"])), History.from_json(c, meta["history"])


@shape
class Launched:
    """A step that is done, but for telling it."""

    step: int
    outcome: Outcome
    learned: Learned
    updates: int  # optimizer steps that counted so far
    rate: float
    words: Words


class GrpoTask(Task):
    at_once = True  # the breaker judges each step before the next one

    def __init__(
        self,
        c: GrpoConfig,
        group: Group,
        voice: Voice,
        position: Position,
        history: History,
        *,
        about: Mapping[str, Any],
    ) -> None:
        """`about`: what `stoker export` and a resumed run need to know of a checkpoint."""
        super().__init__()
        self._c, self._group, self._voice, self._about = c, group, voice, about
        self.position, self.history = position, history
        self.solved: Finding | None = None
        self._speed = Speed(0, group.world, group.device)
        self._speed.begin()

    def hear(self, launched: Launched) -> Answers:
        self._tell(launched)
        finding = self.history.finding()
        if finding is not None and not finding.solved:
            raise Stopped(finding.line)
        if finding is not None:
            self.solved, self.finished = finding, True
            self._voice.say_once(finding.line)
        return agree(launched.words, self._group)

    def meta(self, done: int) -> dict[str, Any]:
        so_far = {**as_json(self.position), "step": done, "history": self.history.to_json()}
        return {"stage": STAGE, **so_far, **self._about}

    def troubled(self) -> bool:
        return self.history.troubled()

    def summary(self) -> str:
        return f"reward {self.history.recent[-1].reward:.3f}"

    def _tell(self, launched: Launched) -> None:
        step, outcome, learned, rate = launched.step, launched.outcome, launched.learned, launched.rate
        tokens = int(outcome.lengths.sum())
        self.position = Position(step + 1, launched.updates, self.position.tokens + tokens)
        kl = learned.kl if self._c.kl > 0 and learned.finite else None
        seen = Seen(
            step,
            outcome.reward,
            outcome.spread,
            correct=float(outcome.correct.mean()),
            kl=kl,
            entropy=learned.entropy if learned.finite else None,
            length=float(outcome.lengths.mean()),
            cut=float(1 - outcome.whole.mean()),
            finite=learned.finite,
            unlike=outcome.unlike(self._c.group),
        )
        self.history.add(seen)
        self._speed.step(tokens, None)
        # A non-finite loss was skipped: reported, it would look like a run that trains on with it.
        stoker.beat(step=step + 1, loss=learned.loss if learned.finite else None, tokens=self.position.tokens)
        if not learned.finite:
            self._voice.say_once(
                f"step {step}: non-finite loss or gradient (loss {learned.loss:g}, norm {learned.norm:g}); update skipped"
            )
        self._voice.step(
            step,
            learned.loss,
            self._speed,
            lambda left: (
                f"Reward: {seen.reward:.3f} | Right: {seen.correct:.0%} | Loss: {learned.loss:.4f} | KL:"
                f" {'n/a' if kl is None else f'{kl:.4f}'} | Entropy: {learned.entropy:.3f} | Length: {seen.length:.1f} |"
                f" Cut: {seen.cut:.0%} | LR: {rate:.2e} | Grad Norm: {learned.norm:.4f} | ETA: {left}"
            ),
            every_rank=False,
            reward=seen.reward,
            correct=seen.correct,
            reward_std=seen.spread,
            kl=kl,
            entropy=learned.entropy,
            length=seen.length,
            cut=seen.cut,
            tokens=self.position.tokens,
            grad_norm=learned.norm,
            lr=rate,
        )


def result(history: History, position: Position, stopped: str | None, solved: Finding | None = None) -> dict[str, Any]:
    """The stage's metrics. Solved: it ended early because there was nothing left to learn, which is no failure."""
    last = history.recent[-FIRST:]

    def mean(values: Sequence[float]) -> float | None:
        return sum(values) / len(values) if values else None

    newest = last[-1] if last else None
    return {
        "steps": position.step,
        "tokens": position.tokens,
        "reward_first": mean([seen.reward for seen in history.first]),
        "reward_last": mean([seen.reward for seen in last]),
        "cut_first": mean([seen.cut for seen in history.first]),
        "cut_last": mean([seen.cut for seen in last]),
        "kl_last": newest.kl if newest else None,
        "entropy_last": newest.entropy if newest else None,
        "length_last": newest.length if newest else None,
        "stopped": stopped,
        "solved": solved.line if solved else None,
    }
