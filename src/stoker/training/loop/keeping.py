"""Where a GRPO run goes on, and what its checkpoints hold: weights, optimizer, the step, and the numbers the breaker
looks back at.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from stoker.contract import layout
from stoker.contract.names import EX_CONFIG, EX_DATAERR, Refusal
from stoker.contract.shape import shape
from stoker.training.checkpoint import folders
from stoker.training.checkpoint.reading import Checkpoint, find, open_checkpoint, verify
from stoker.training.checkpoint.saver import Saver
from stoker.training.config.schema import Config
from stoker.training.loop.resume import located, run_of
from stoker.training.loop.say import Voice, where_runs_go
from stoker.training.parallel.group import Group
from stoker.training.rl.breaker import History

STAGE = "grpo"


@shape
class Position:
    step: int = 0  # steps that are done
    updates: int = 0  # optimizer steps that counted
    tokens: int = 0  # of answers so far


def folder_of(c: Config) -> str:
    return os.path.abspath(c.checkpoint.folder or os.path.join(where_runs_go(c), layout.CHECKPOINTS))


def found_checkpoint(c: Config, group: Group, voice: Voice) -> Checkpoint | None:
    """Rank 0 looks and checks every byte; the others take its word, or refuse with it."""
    folder, told = folder_of(c), c.checkpoint
    # What this run itself has saved, in an attempt before, comes first: `never` or another run's folder says how it
    # began.
    again = bool(told.folder) and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    of_run = run_of(where_runs_go(c)) if again and told.resume != "auto" else ""  # others' lie in that folder, too

    def look() -> str | None:
        if (told.resume == "auto" or again or not told.folder) and os.path.isdir(folder):
            best = find(folder, voice.say, of_run=of_run)
            if best is not None:
                return best.path
            if not of_run and folders.steps_in(folder):
                voice.say(f"no sound checkpoint in {folder}: it begins anew")
        if told.resume in ("auto", "never"):
            return None
        path = located(told.resume)
        wrong = verify(path)
        if wrong:
            raise Refusal(f"checkpoint.resume {path} is damaged: {wrong[0]}", EX_DATAERR)
        return path

    path = group.agreed(look)
    return open_checkpoint(path) if path else None


def go_on(c: Config, group: Group, voice: Voice, tensors: Mapping[str, Tensor]) -> tuple[Position, History]:
    """The weights as the newest checkpoint has them, where there is one."""
    found = found_checkpoint(c, group, voice)
    if found is None:
        return Position(), History(c.grpo)
    told = found.meta
    if told.get("stage") != STAGE:
        raise Refusal(
            f"checkpoint {found.path} is of stage {told.get('stage', 'pretrain')}, not {STAGE}: name its model with"
            " model.load instead",
            EX_CONFIG,
        )
    if told.get("optimizer") != c.optim.kind:
        raise Refusal(
            f"checkpoint {found.path} has the state of optim.kind {told.get('optimizer')}, not {c.optim.kind}",
            EX_CONFIG,
        )
    found.read_into(tensors)
    voice.say_once(f"resumes at step {told['step']} from {found.path}")
    return Position(int(told["step"]), int(told["updates"]), int(told["tokens"])), History.from_json(
        c.grpo, told["history"]
    )


class Keeper:
    """When to save, and saving. `about`: what `stoker export` needs to know of a checkpoint."""

    def __init__(
        self, c: Config, group: Group, voice: Voice, tensors: Mapping[str, Tensor], about: Mapping[str, Any]
    ) -> None:
        self._c, self._group, self._voice, self._tensors, self._about = c, group, voice, tensors, about
        self.saver = self._saver()
        self._at = time.monotonic()
        self._put_off = False  # and that was said

    def due(self) -> bool:
        """By rank 0's clock."""
        every = self._c.checkpoint.every
        return self._group.first and every > 0 and time.monotonic() - self._at >= every

    def step_due(self, done: int) -> bool:
        every = self._c.checkpoint.every_steps
        return every > 0 and done % every == 0

    def save(self, position: Position, history: History, *, wait: bool) -> bool:
        """At a step that all ranks know. A step that looks broken is not kept: the one before it may be the last good
        one.
        """
        if history.troubled():
            if not self._put_off:
                self._voice.say_once(
                    f"no checkpoint at step {position.step}: its numbers look broken; the one before stays"
                )
            self._put_off = True
            return True
        self._put_off = False
        meta: dict[str, Any] = {
            "stage": STAGE,
            "step": position.step,
            "updates": position.updates,
            "tokens": position.tokens,
            "optimizer": self._c.optim.kind,
            "history": history.to_json(),
            "run": run_of(where_runs_go(self._c)),
            **self._about,
        }
        taken = self.saver.save(position.step, self._tensors, meta, wait=wait)
        self._at = time.monotonic()
        return taken

    def last_good(self) -> str:
        """Words about the newest checkpoint, for somebody whose run was stopped."""
        self.saver.close()
        steps = folders.steps_in(folder_of(self._c))
        return f"the last good checkpoint is {steps[max(steps)]}" if steps else "no checkpoint was saved before it"

    def _saver(self) -> Saver:
        """Rank 0 takes the folder first: if it can't, all refuse with its line, and nobody waits for anybody."""
        c, group = self._c.checkpoint, self._group
        token = group.from_first(os.urandom(4).hex())
        made: list[Saver] = []

        def make() -> None:
            made.append(
                Saver(
                    folder_of(self._c),
                    rank=group.rank,
                    world=group.world,
                    token=token,
                    say=self._voice.say,
                    keep=c.keep,
                    keep_best=False,
                )
            )

        group.agreed(make)
        if not group.first:
            make()
        return made[0]
