"""The training loop of every stage: stopping, saving, validation, the end. A recipe launches the steps:

    for batch in loop.over(batches):
        loop.launched(stepper.step(batch, ..., words=loop.words))

Each step is launched before the numbers of the one before are read. All ranks act on the same numbers at the same step.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch

import stoker
from stoker.contract.errors import EX_CANTCREAT
from stoker.contract.frozen import frozen
from stoker.training.checkpoint.folders import name_of
from stoker.training.loop.keeping import BROKEN, BUSY, Keeper
from stoker.training.loop.say import Voice
from stoker.training.loop.speed import Profile
from stoker.training.parallel.group import Group

# Steps as long as this gain nothing from launching the next one early, and a stop would have to wait for that one too.
SLOW_S = 2.0
BUFFERS_AFTER = 5  # steps: past the capture of a CUDA graph, which pinning memory would disturb
Batch = TypeVar("Batch")
Words = tuple[bool, bool, bool, bool]  # stop, save, busy, slow


@frozen
class Answers:
    """What the ranks said with a step, the same on all of them."""

    stop: bool  # somebody was told to stop
    save: bool  # by rank 0's clock
    busy: bool  # somebody still writes the checkpoint before
    slow: bool  # by rank 0's clock: steps take seconds


def agree(words: Words, group: Group) -> Answers:
    """True on all ranks where it is on one: for steps whose own exchange does not carry the words."""
    total = group.sum(torch.tensor([float(word) for word in words], device=group.device)).tolist()
    return Answers(*(value > 0 for value in total))


class Task:
    """What a kind of training adds to the loop: its numbers, its validation, what its checkpoints hold."""

    at_once = False  # each step's numbers are read before the next one is launched

    def __init__(self) -> None:
        self.finished = False  # nothing is left to learn, though steps are left
        self.score: float | None = None  # the validation loss of this very step

    def hear(self, launched: Any) -> Answers:
        """Reads a step's numbers and reports them. Raises where they end the run."""
        raise NotImplementedError

    def validation_due(self, done: int) -> bool:
        return False

    def validate(self, done: int) -> bool:
        """Whether it is the best so far, and worth a checkpoint."""
        return False

    def meet(self, whole: bool = False) -> None:
        """Ranks that learn alone stand at one place before they are measured or saved; `whole`: with their optimizers."""

    def meta(self, done: int) -> dict[str, Any]:
        """What a checkpoint says of its run."""
        raise NotImplementedError

    def troubled(self) -> bool:
        """The newest step looks broken: its weights are not worth a checkpoint."""
        return False

    def summary(self) -> str:
        """For the last line."""
        raise NotImplementedError


class Loop:
    def __init__(
        self, task: Task, keeper: Keeper, group: Group, voice: Voice, profile: Profile, *, first: int, steps: int
    ) -> None:
        self._task, self._keeper, self._group, self._voice, self._profile = task, keeper, group, voice, profile
        self.first, self.steps = first, steps
        self.done = first
        self.code = 0
        self.stopping = False  # this rank was told to stop
        self._over = self._is_abandoned = False
        self._unheard: Any = None  # a launched step whose numbers were not read yet
        self._busy = self._slow = False  # as of the last numbers
        self._took, self._since = 0.0, time.monotonic()  # seconds of the step before; when this one began

    def listen(self) -> None:
        """From here on a signal ends the run at a step. Called before what takes long ahead of the first one."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop)

    def over(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Hands out what each step learns from, until all is done or a stop is agreed on; then saves."""
        self.listen()
        self._since = time.monotonic()
        for batch in batches:
            before = self.done
            yield batch
            if self._is_abandoned:
                break
            assert self.done == before + 1, "a recipe launches one step for each batch"
            if self._over or self._task.finished:
                break
        if self._unheard is not None:
            self._hear()
        self._profile.close()
        self._end()

    def abandon_step(self) -> None:
        """End the run before this step, on all ranks: a stop came while it waited. A resumed run begins with the step."""
        self._is_abandoned = True

    def words(self) -> Words:
        """What this rank says with its step: stop, save, busy, slow."""
        slow = self._group.first and self._took > SLOW_S
        return self.stopping, self._keeper.time_due(), self._keeper.saver.busy(), slow

    def launched(self, step: Any) -> None:
        """`step`: whatever the task's `hear` reads. Reads the step before, saves and validates where that is due."""
        task, keeper = self._task, self._keeper
        agreed = self._hear() if self._unheard is not None else None
        self._unheard = step
        self.done, task.score = self.done + 1, None
        if self.done == self.first + BUFFERS_AFTER + 1 and keeper.wanted:
            keeper.saver.prepare_buffers(keeper.tensors)
        self._profile.step()
        save = (agreed is not None and agreed.save) or keeper.step_due(self.done, self.steps)
        now = task.at_once or save or task.validation_due(self.done) or self._slow
        if (agreed is None or not agreed.stop) and now:
            # Its line comes before the validation's, and a checkpoint never counts a step that may not have been finite.
            agreed = self._hear()
            save = save or agreed.save
        if (agreed is not None and agreed.stop) or (self.stopping and self._group.world == 1):
            self._over = True
            return
        self._took, self._since = time.monotonic() - self._since, time.monotonic()
        self._busy, self._slow = (agreed.busy, agreed.slow) if agreed is not None else (False, False)
        if task.validation_due(self.done):
            save = task.validate(self.done) or save
        if save and not task.finished:
            self._save_if_free()

    @property
    def whole(self) -> bool:
        return self.done >= self.steps or self._task.finished

    def _hear(self) -> Answers:
        step, self._unheard = self._unheard, None
        return self._task.hear(step)

    def _stop(self, number: int, frame: Any) -> None:
        """Ctrl-C or a launcher's stop: all ranks agree on the step, then save. A second one means now."""
        if self.stopping:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.stopping = True

    def _save_if_free(self) -> None:
        """At a step that all ranks know."""
        if self._busy:
            self._keeper.skip(
                BUSY,
                f"no checkpoint at step {self.done}, and more may be left out: the one before is still being written;"
                " save less often",
            )
        else:
            self._save(wait=False)

    def _save(self, wait: bool) -> bool:
        if self._task.troubled():
            self._keeper.skip(
                BROKEN, f"no checkpoint at step {self.done}: its numbers look broken; the one before stays"
            )
            return True
        self._task.meet(whole=True)
        return self._keeper.save(self.done, self._task.meta(self.done), self._task.score, wait=wait)

    def save_before_stop(self) -> None:
        """For a recipe that ends the run between two steps: all ranks are here. Weights that look broken are not saved."""
        if self.done > self.first and self._keeper.saved_step != self.done and self._keeper.end_due(False):
            stoker.phase("save")
            self._save(wait=True)

    def _end(self) -> None:
        keeper = self._keeper
        self._task.meet()  # before an export, too
        if self.whole and self._task.score is None:
            self._task.validate(self.done)
        moved = self.done > self.first
        if moved and keeper.end_due(self.whole):
            stoker.phase("save")
            if not self._save(wait=True):
                self._voice.say_once(
                    f"the last checkpoint could not be written: {keeper.saver.problem() or 'another rank failed'}"
                )
                self.code = EX_CANTCREAT
        keeper.saver.close()
        saved = not self.whole and not self.code and moved and keeper.saved_step == self.done
        self._voice.say_once(
            f"{'done' if self.whole else 'stopped'}: {self.done} of {self.steps} steps, {self._task.summary()}"
            + (f"; saved {keeper.folder}/{name_of(self.done)}" if saved else "")
        )
