"""The steps of a GRPO run: sample prompts, write answers, judge them, learn; all ranks act on the same numbers at the
same step.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import torch

import stoker
from stoker.contract.names import EX_CANTCREAT
from stoker.training.config.schema import Config
from stoker.training.loop.say import Voice
from stoker.training.loop.speed import Speed, clock
from stoker.training.optim import schedule
from stoker.training.parallel.group import Group
from stoker.training.rl.advantage import advantages
from stoker.training.rl.breaker import FIRST, Finding, History, Seen, Stopped
from stoker.training.rl.keeping import Keeper, Position
from stoker.training.rl.prompts import Draw, Prompt
from stoker.training.rl.rollout import Answer, Outcome, Rollout, outcome
from stoker.training.rl.update import Learned, Updater

Rewarding = Callable[[Sequence[Answer]], tuple[list[float], list[bool]]]


class Steps:
    def __init__(
        self,
        c: Config,
        group: Group,
        voice: Voice,
        prompts: Sequence[Prompt],
        draw: Draw,
        rollout: Rollout,
        rewarding: Rewarding,
        updater: Updater,
        keeper: Keeper,
        position: Position,
        history: History,
        steps: int,
    ) -> None:
        self._c, self._group, self._voice, self._prompts, self._draw = c, group, voice, prompts, draw
        self._rollout, self._rewarding, self._updater, self._keeper = rollout, rewarding, updater, keeper
        self.position, self.history, self.steps = position, history, steps
        self._speed = Speed(0, group.world, group.device)
        self.solved: Finding | None = None
        self._told_to_stop = False

    def run(self) -> int:
        """Gives the exit code; raises Stopped where the breaker has something to say."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop)
        first, stop = self.position.step, False
        self._speed.begin()
        while self.position.step < self.steps and not stop and self.solved is None:
            self._step(self.position.step)
            finding = self.history.finding()
            if finding is not None and not finding.solved:
                raise Stopped(f"{finding.line}; {self._keeper.last_good()}")
            self.solved = finding
            stop, due, busy = self._agreed(self._told_to_stop, self._keeper.due(), self._keeper.saver.busy())
            if (due or self._keeper.step_due(self.position.step)) and not busy and not stop:
                self._keeper.save(self.position, self.history, wait=False)
        return self._end(self.position.step > first)

    @property
    def whole(self) -> bool:
        return self.position.step >= self.steps or self.solved is not None

    def _end(self, moved: bool) -> int:
        code = 0
        if moved and (self._c.checkpoint.at_end or not self.whole):
            stoker.phase("save")
            if not self._keeper.save(self.position, self.history, wait=True):
                self._voice.say_once(
                    f"the last checkpoint could not be written: {self._keeper.saver.problem() or 'another rank failed'}"
                )
                code = EX_CANTCREAT
        self._keeper.saver.close()
        if self.solved is not None:
            self._voice.say_once(self.solved.line)
        self._voice.say_once(
            f"{'done' if self.whole else 'stopped'}: {self.position.step} of {self.steps} steps, reward"
            f" {self.history.recent[-1].reward:.3f}"
        )
        return code

    def _stop(self, number: int, frame: Any) -> None:
        """Ctrl-C or a launcher's stop: all ranks agree on the step, then save. A second one means now."""
        if self._told_to_stop:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._told_to_stop = True

    def _agreed(self, *words: bool) -> list[bool]:
        """True on all ranks where it is on one."""
        return [
            value > 0
            for value in self._group.sum(
                torch.tensor([float(word) for word in words], device=self._group.device)
            ).tolist()
        ]

    def _step(self, step: int) -> None:
        c, seed = self._c.grpo, self._c.train.seed
        asked = [self._prompts[index] for index in self._draw(step, seed, c.prompts_per_step)]
        answers = self._rollout(asked, seed, step)
        rewards, correct = self._rewarding(answers)
        all_ = outcome(answers, rewards, correct, c.prompts_per_step * c.group, self._group)
        above = (
            advantages(torch.tensor(rewards, dtype=torch.float64).view(-1, c.group), c.scale_by_deviation)
            .flatten()
            .tolist()
        )
        share = schedule.share(self._c.optim, step, self.steps)
        learned = self._updater.learn(answers, above, [int(length) for length in all_.lengths.tolist()], share)
        self._rollout.refresh()
        self._tell(step, all_, learned, self._c.optim.learning_rate * share)

    def _tell(self, step: int, all_: Outcome, learned: Learned, rate: float) -> None:
        tokens = int(all_.lengths.sum())
        self.position = Position(step + 1, self._updater.done, self.position.tokens + tokens)
        kl = learned.kl if self._c.grpo.kl > 0 and learned.finite else None
        seen = Seen(
            step,
            all_.reward,
            all_.spread,
            float(all_.correct.mean()),
            kl,
            learned.entropy if learned.finite else None,
            float(all_.lengths.mean()),
            float(1 - all_.whole.mean()),
            learned.finite,
            all_.unlike(self._c.grpo.group),
        )
        self.history.add(seen)
        self._speed.step(tokens, None)
        # A loss that is no number was skipped: told, it would be taken for a run that goes on with it.
        stoker.beat(step=step + 1, loss=learned.loss if learned.finite else None, tokens=self.position.tokens)
        if not learned.finite:
            self._voice.say_once(
                f"step {step}: the loss or its gradient is no number (loss {learned.loss:g}, norm {learned.norm:g}): it"
                " changes nothing"
            )
        if step % self._c.train.log_every and step + 1 != self.steps:
            return
        left = self._speed.seconds_per_step
        fast = self._speed.tokens_per_s
        self._voice.say_once(
            f"Step [{step}/{self.steps}] | Reward: {seen.reward:.3f} | Right: {seen.correct:.0%} | Loss:"
            f" {learned.loss:.4f} | KL: {'n/a' if kl is None else f'{kl:.4f}'} | Entropy: {learned.entropy:.3f} |"
            f" Length: {seen.length:.1f} | Cut: {seen.cut:.0%} | LR: {rate:.2e} | Grad Norm: {learned.norm:.4f} | ETA:"
            f" {clock(left * (self.steps - step - 1) if left is not None else None)}"
        )
        self._voice.metrics(
            step,
            loss=learned.loss,
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
            tokens_per_s=round(fast, 1) if fast else None,
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
