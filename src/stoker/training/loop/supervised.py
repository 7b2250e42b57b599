"""The steps of a run. Each one is launched before the numbers of the one before are read; all ranks act on the same
numbers at the same step.
"""

from __future__ import annotations

import math
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import stoker
from stoker.contract.names import EX_CANTCREAT
from stoker.training.balance.balancer import Balancer
from stoker.training.checkpoint.folders import name_of
from stoker.training.loop import resume as going_on
from stoker.training.loop import trip
from stoker.training.loop.evaluate import Validation
from stoker.training.loop.feeder import CUT_AHEAD, Feeder, StepBatch
from stoker.training.loop.profiling import Profile
from stoker.training.loop.samplelog import SampleLog
from stoker.training.loop.speed import Speed
from stoker.training.loop.step import Numbers, Pending, Stepper
from stoker.training.model.decoder import flops_per_token
from stoker.training.optim import schedule
from stoker.training.tokenizer.tokenizer import load as load_tokenizer

if TYPE_CHECKING:
    from stoker.training.checkpoint.saver import Saver
    from stoker.training.loop.job import Job

# steps as long as that gain nothing by the next one's being launched early, and a stop would have to wait for that one
# too
SLOW_S = 2.0
BUFFERS_AFTER = 5  # steps: past the capture of a CUDA graph, which pinning memory would disturb


class Loop:
    def __init__(self, job: Job, saver: Saver, stepper: Stepper) -> None:
        self.job, self.c, self.group, self.voice, self.saver, self.stepper = (
            job,
            job.c,
            job.group,
            job.voice,
            saver,
            stepper,
        )
        self.first = self.done = job.position.step
        self.code = 0
        self.loss = float("nan")
        self.tokens = job.position.tokens  # since the beginning of the run
        self.told_to_stop = False
        self.score: float | None = None  # the validation of this very step
        self.best = job.position.best
        self.validation: Validation | None = None  # the newest
        self.skipped = False  # a checkpoint was left out, and that was said
        self.busy = False  # somebody's save is under way, as of the last numbers
        self.slow = False  # as of the last numbers: each step's are read before the next is launched
        self.took = 0.0  # seconds, the step before
        self.saved_at, self.saved_step = time.monotonic(), self.done
        self.speed = Speed(flops_per_token(job.shape, self.c.data.context_length), self.group.world, self.group.device)
        self.profile = Profile(
            self.c.train.profile_steps if self.c.train.profile and self.group.first else 0,
            job.folder,
            self.group.device,
            self.voice.say,
        )
        self.balancer = self._balancer()
        self.sample_log = (
            SampleLog(job.folder, self.group.rank, job.position.step) if self.c.train.log_samples else None
        )

    def _balancer(self) -> Balancer | None:
        job = self.job
        if job.clock is None:
            return None
        return Balancer(
            job.batch,
            self.group.world,
            job.plans,
            ahead=CUT_AHEAD,
            lag=job.clock.lag,
            comm=self.c.parallel.comm,
            say=self.voice.say_once,
            tell=self.voice.plan,
        )

    def run(self, feeder: Feeder) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop)
        before: tuple[Pending, StepBatch, float] | None = None
        self.speed.begin()
        since = time.monotonic()
        for batch in feeder:
            self.job.drill.step = batch.step
            share = schedule.share(self.c.optim, batch.step, self.job.steps)
            pending = self.stepper.step(batch, share, words=self._words)
            self.done, self.score = batch.step + 1, None
            told = self._hear(*before) if before is not None else None
            if batch.step == self.first + BUFFERS_AFTER and self._saves():
                self.saver.prepare_buffers_aside(self.job.tensors)
            before = (pending, batch, share)
            self.profile.step()
            save = (told is not None and told.save) or self._step_to_save()
            if (told is None or not told.stop) and (save or self._validation_due() or self.slow):
                # Its line comes before the validation's, and a checkpoint never counts a step that may not have been
                # finite.
                told = self._hear(*before)
                before = None
                save = save or told.save
            if (told is not None and told.stop) or (self.told_to_stop and self.group.world == 1):
                break
            self.took, since = time.monotonic() - since, time.monotonic()
            self.busy, self.slow = (told.busy, told.slow) if told is not None else (False, False)
            if self._validation_due():
                save = self._validate() or save
            if save:
                self._save_if_free()
        if before is not None:
            self._hear(*before)
        self.profile.close()
        self._end()

    def _stop(self, number: int, frame: Any) -> None:
        """Ctrl-C or a launcher's stop: all ranks agree on the step, then save. A second one means now."""
        if self.told_to_stop:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.told_to_stop = True

    def _words(self) -> tuple[bool, bool, bool, bool]:
        return self.told_to_stop, self._due(), self.saver.busy(), self.group.first and self.took > SLOW_S

    def _due(self) -> bool:
        every = self.c.checkpoint.every
        return self.group.first and every > 0 and not self.saver.busy() and time.monotonic() - self.saved_at >= every

    def _saves(self) -> bool:
        c = self.c.checkpoint
        return c.every > 0 or c.every_steps > 0 or c.at_end

    def _step_to_save(self) -> bool:
        """The last one comes after its validation: `_end` makes it."""
        every = self.c.checkpoint.every_steps
        return every > 0 and self.done % every == 0 and not (self.done == self.job.steps and self.c.checkpoint.at_end)

    def _validation_due(self) -> bool:
        every = self.c.train.eval_every
        return every > 0 and self.done % every == 0 and self.done < self.job.steps and self.job.held_out is not None

    def _hear(self, pending: Pending, batch: StepBatch, share: float) -> Numbers:
        numbers = pending.read()
        if batch.step == self.first:
            self.job.stages.done("first step")
            self.voice.say_once(f"first step after {self.job.stages.said()}")
        if numbers.bad:
            text = load_tokenizer(self.job.material.tokenizer)
            folder = self.job.folder if self.c.nan.dump else None
            found = trip.explain(
                numbers,
                batch,
                self.stepper,
                self.job.model,
                self.job.wrapped,
                self.job.drill,
                self.group,
                self.voice,
                folder=folder,
                decode=text.decode,
            )
            self.saver.close()  # a save under way is of steps that were finite: it is the one to go back to
            raise found
        self.loss = numbers.loss
        self.tokens += batch.tokens
        self.speed.step(batch.tokens, pending.when)
        stoker.beat(step=numbers.step + 1, loss=numbers.loss, tokens=self.tokens)
        if self.sample_log is not None:
            self.sample_log.write(batch.step, batch.ids)
        if self.balancer is not None:
            self.balancer.hear(numbers.step, batch.samples, numbers.compute, numbers.waiting)
        self.voice.step(numbers, self.c.optim.learning_rate * share, self.speed, self.tokens)
        return numbers

    def _validate(self) -> bool:
        """Whether it is the best so far, and worth a checkpoint."""
        job = self.job
        if job.held_out is None:
            return False
        stoker.phase("eval")
        self._meet()
        found = job.learner.measure(
            job.wrapped, job.held_out, self.group, tokens=self.c.train.eval_tokens, micro=self.micro
        )
        self.validation = found
        better = math.isfinite(found.loss) and (self.best is None or found.loss < self.best)
        self.score = found.loss
        if better:
            self.best = found.loss
        self.voice.validation(self.done, found, self.best)
        self.speed.begin()
        stoker.phase("train")
        return better and self.c.checkpoint.keep_best and self._saves()

    @property
    def micro(self) -> int:
        return self.job.micro

    def _save_if_free(self) -> None:
        """At a step that all ranks know."""
        if not self.busy:
            self._save(wait=False)
        elif not self.skipped:
            self.skipped = True
            self.voice.say_once(
                f"no checkpoint at step {self.done}, and more may be left out: the one before is still being written;"
                " save less often"
            )

    def _meet(self, whole: bool = False) -> None:
        """Ranks that learn alone stand at one place before they are measured or saved; `whole`: with their optimizers."""
        if self.job.meeting is not None:
            state = [one for name, one in self.job.tensors.items() if name.startswith("optim.")] if whole else []
            self.saver.before_update()  # a snapshot of the step before must be out first
            self.job.meeting.meet(self.job.optimizer.parameters, state)

    def _save(self, wait: bool) -> bool:
        job = self.job
        self._meet(whole=True)
        samples = job.course.of_step(self.done - self.first - 1)[1]
        position = going_on.Position(self.done, samples, self.tokens, self.best)
        meta = going_on.meta(position, job.data, job.shape, job.material, self.c.optim.kind)
        meta |= {"run": going_on.run_of(job.folder), "batch": [job.batch, self.group.world]}
        if job.plans is not None:
            meta["balance"] = job.plans.told(self.done)
        taken = self.saver.save(self.done, job.tensors, meta, self.score, wait=wait)
        self.saved_at, self.saved_step = time.monotonic(), self.done
        return taken

    def _end(self) -> None:
        whole = self.done >= self.job.steps
        self._meet()  # before an export, too
        if whole:
            self._validate()
        if (self.c.checkpoint.at_end or not whole) and self.done > self.first:
            stoker.phase("save")
            if not self._save(wait=True):
                self.voice.say_once(
                    f"the last checkpoint could not be written: {self.saver.problem() or 'another rank failed'}"
                )
                self.code = EX_CANTCREAT
        if self.sample_log is not None:
            self.sample_log.close()
        best = f", best validation {self.best:.4f}" if self.best is not None else ""
        saved = (
            f"; saved {self.job.checkpoints}/{name_of(self.done)}"
            if not whole and not self.code and self.saved_step == self.done > self.first
            else ""
        )
        self.voice.say_once(
            f"{'done' if whole else 'stopped'}: {self.done} of {self.job.steps} steps, loss"
            f" {self.loss:.4f}{best}{saved}"
        )
