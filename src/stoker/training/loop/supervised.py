"""Learning from rows that are there before the run: pretraining, midtraining, fine-tuning, the reward model."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TextIO

from torch import Tensor

import stoker
from stoker.contract import layout
from stoker.contract.frozen import frozen, replace
from stoker.contract.safe_io import APPEND, write_atomic
from stoker.contract.text import escape_lines
from stoker.training.balance.plan import Balancer
from stoker.training.checkpoint.saver import Saver
from stoker.training.forensics import replay
from stoker.training.forensics.culprit import NonFinite, banner, decide
from stoker.training.forensics.report import Report
from stoker.training.loop import resume
from stoker.training.loop.config import TrainConfig
from stoker.training.loop.feeder import CUT_AHEAD, Course, MicroBatch, Rows, StepBatch
from stoker.training.loop.learner import Validation
from stoker.training.loop.run import Answers, Task
from stoker.training.loop.samples import SampleLog, chosen
from stoker.training.loop.say import Voice
from stoker.training.loop.speed import Speed, Startup
from stoker.training.loop.step import Numbers, Parts, Pending, Stepper
from stoker.training.model import ready
from stoker.training.model.config import flops_per_token
from stoker.training.optim.config import OptimConfig
from stoker.training.parallel.group import no_sync
from stoker.training.tokenizer.tokenizer import load as load_tokenizer

BEFORE = "before.json"


@frozen
class Launched:
    pending: Pending
    batch: StepBatch
    rate: float
    numbers: Mapping[str, Tensor] = {}  # what the learner says besides


@frozen
class Start:
    """Where a run begins: at its first step, or where a checkpoint left it."""

    position: resume.Position
    data: resume.Data
    course: Course
    steps: int  # of the whole run


@frozen
class Settings:
    """Those that the task looks at."""

    folder: str  # the run directory
    train: TrainConfig
    optim: OptimConfig
    comm: str
    dump: bool  # write what explains a non-finite step
    keep_best: bool  # a validation that is the best so far is worth a checkpoint


class Supervised(Task):
    def __init__(
        self, parts: Parts, start: Start, c: Settings, stepper: Stepper, saver: Saver, voice: Voice, startup: Startup,
        planned_bytes: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._planned_bytes = planned_bytes
        self.tokens_per_s: float | None = None  # of the last steps before a validation or the end
        self._parts, self._start, self._c = parts, start, c
        self._stepper, self._saver, self._voice, self._startup = stepper, saver, voice, startup
        self._group, self._material = parts.group, parts.material
        self.loss = float("nan")
        self.tokens = start.position.tokens  # since the beginning of the run
        self.best, self._waited = start.position.best, start.position.waited
        self._skipped = start.position.skipped
        self.out_of_patience = False  # it was stopped early: the best checkpoint is what counts
        per_token = flops_per_token(parts.model.config, parts.model.context_length)
        self._speed = Speed(per_token, self._group.world, self._group.device)
        self._balancer: Balancer | None = None
        if parts.clock is not None:
            self._balancer = Balancer(
                parts.batch,
                self._group.world,
                parts.plans,
                ahead=CUT_AHEAD,
                lag=parts.clock.lag,
                comm=c.comm,
                say=voice.say_once,
                tell=voice.plan,
            )
        self._asked = self._prompts()
        self._samples = sample_log(c.folder, self._group.rank) if c.train.log_samples else None

    def begin(self, stopping: Callable[[], bool]) -> None:
        """train.eval_first is kept in a file: the run may resume in another attempt, which can't measure it. `stopping`: this
        rank was told to stop."""
        if self._c.train.eval_first and not self._start.position.step and self._material.held_out is not None:
            found = self._measure(self._material.held_out)
            self._voice.say_once(f"Validation before the first step | Loss: {found.loss:.4f}")
            if self._group.first:
                before = {"val_loss_before": found.loss, "val_bits_per_byte_before": found.bits_per_byte}
                text = json.dumps({"schema": layout.SCHEMA, **before})
                write_atomic(os.path.join(self._c.folder, BEFORE), text.encode())
        if self._asked is not None and not self._start.position.step:
            # Of a model in shards all ranks make the same passes.
            self._asked.write(self._parts.model, 0, stopping if self._group.strategy != "fsdp" else None)
        if self._start.position.step == 0 and (self._asked is not None or self._c.train.eval_first):
            self._startup.done("validation and sample answers" if self._c.train.eval_first else "sample answers")
        self._parts.learner.numbers(self._parts.model)  # those of trial steps
        stoker.mark("POST-MODEL")
        stoker.phase("train")
        self._speed.begin()

    def hear(self, launched: Launched) -> Answers:
        pending, batch = launched.pending, launched.batch
        numbers = pending.read()
        if batch.step == self._start.position.step:
            self._startup.done("first step")
            self._voice.say_once(f"first step after {self._startup.said()}")
        if numbers.bad:
            summary = self._explain(numbers, batch)
            self._saver.close()  # a save under way is of finite steps: it is the one to go back to
            raise NonFinite(summary)
        if numbers.skipped:
            self._skipped += 1
            self._voice.say_once(
                f"step {numbers.step}: a gradient overflowed in fp16; update skipped, loss scale {numbers.loss_scale:g} halved"
            )
        self.loss = numbers.loss
        self.tokens += batch.tokens
        self._speed.step(batch.tokens, pending.when)
        stoker.beat(step=numbers.step + 1, loss=numbers.loss, tokens=self.tokens)
        if self._samples is not None:
            # `from`: the step this attempt began at; of a step made twice, the line with the larger one counts.
            told = {"step": batch.step, "from": self._start.position.step, "ids": batch.ids}
            self._samples.write(json.dumps(told) + "\n")
        if self._balancer is not None:
            self._balancer.hear(numbers.step, batch.samples, numbers.compute, numbers.waiting)
        self._report(numbers, launched)
        return numbers.answers

    def _explain(self, numbers: Numbers, batch: StepBatch) -> str:
        """A non-finite step, replayed and explained by all ranks together. Gives the summary they agree on."""
        parts, group, stepper = self._parts, self._group, self._stepper
        parts.drill.step = batch.step
        ready.unfuse(parts.model)  # module by module, so that the first bad operation has a name
        stepper.scale(batch)

        def run(number: int, micro: MicroBatch) -> Tensor:
            stepper.set_seed(batch.step, number)
            # Whole gradients stay this rank's own; shards exist only after their exchange.
            with no_sync(parts.wrapped, last=group.strategy == "fsdp"):
                return stepper.forward_backward(micro)

        micro_batches = [
            replay.MicroBatch(
                partial(run, number, micro), micro.ids, micro.inputs[: len(micro.ids)], micro.targets[: len(micro.ids)]
            )
            for number, micro in enumerate(batch.micro_batches)
        ]
        again = replay.Replay(micro_batches, after=parts.drill.spoil_gradients)
        known = Report(batch.step, group.rank, group.world, group.label, numbers.loss, numbers.norm)
        known = replace(known, injected=parts.drill.injected)
        found = replay.investigate(parts.model, again, known)
        culprits = decide([Report.from_json(one) for one in group.all(found.report.to_json())])
        where = ""
        if self._c.dump:
            decode = load_tokenizer(self._material.tokenizer).decode
            everything = group.first or group.strategy == "fsdp" or not culprits.ranks
            try:
                written = replay.write_dump(
                    self._c.folder, found, parts.model, again, decode=decode, parameters=everything
                )
                where = f"; `stoker nan {written}` shows it"
            except OSError as problem:
                self._voice.say(f"the dump could not be written: {problem}")
        if group.rank in culprits.ranks or (not culprits.ranks and group.first):
            print(escape_lines(banner(found.report)), flush=True)
            self._voice.say(f"{culprits.summary}{where}")
        return culprits.summary

    def _report(self, numbers: Numbers, launched: Launched) -> None:
        speed, rate = self._speed, launched.rate
        mfu, memory, fast, per_step = speed.mfu, speed.memory(), speed.tokens_per_s, speed.seconds_per_step
        self.tokens_per_s = fast or self.tokens_per_s
        logged = numbers.step % self._c.train.log_every == 0 or numbers.step + 1 == self._start.steps
        values = {name: float(value) for name, value in launched.numbers.items()} if logged else {}
        more = {name: value for name, value in values.items() if math.isfinite(value)}  # a rank may have had no pair
        scale = {"loss_scale": numbers.loss_scale} if numbers.loss_scale else {}
        said = "".join(f" | {name.replace('_', ' ')}: {value:.4f}" for name, value in more.items())
        self._voice.step(
            numbers.step,
            numbers.loss,
            speed,
            lambda left: (
                f"Loss: {numbers.loss:.4f} | LR: {rate:.2e} | Grad Norm: {numbers.norm:.4f} | ETA: {left} |"
                f" {f'{fast:,.0f}' if fast else '?'} tok/s | MFU: {f'{mfu:.1%}' if mfu else 'n/a'} | Mem:"
                f" {f'{memory / 2**30:.1f} GiB' if memory else 'n/a'}{said}"
            ),
            every_rank=True,
            tokens=self.tokens,
            grad_norm=numbers.norm,
            lr=rate,
            mfu=round(mfu, 4) if mfu else None,
            memory=memory,
            peak_bytes=memory,
            planned_bytes=self._planned_bytes,
            seconds_per_step=round(per_step, 6) if per_step else None,
            **scale,
            **more,
        )

    def validation_due(self, done: int) -> bool:
        every = self._c.train.eval_every
        return every > 0 and done % every == 0 and done < self._start.steps and self._material.held_out is not None

    def validate(self, done: int) -> bool:
        if self._material.held_out is None:
            return False
        stoker.phase("eval")
        self.meet()
        found = self._measure(self._material.held_out)
        better = math.isfinite(found.loss) and (self.best is None or found.loss < self.best)
        self.score = found.loss
        self._waited = 0 if better else self._waited + 1
        if better:
            self.best = found.loss
        self._voice.validation(done, found, self.best)
        if self._asked is not None:
            self._asked.write(self._parts.model, done)
        if 0 < self._c.train.patience <= self._waited and done < self._start.steps:
            self._voice.say_once(
                f"train.patience: {self._waited} validations without a loss below {self.best}: stopping after step {done}"
            )
            self.finished = self.out_of_patience = True
        self._speed.begin()
        stoker.phase("train")
        return better and self._c.keep_best

    def _prompts(self) -> SampleLog | None:
        """train.samples, of a loaded model that learns to answer. Rank 0 asks alone; of a model in shards all ranks make its
        passes, and rank 0 writes down what comes of them."""
        parts, count, rows = self._parts, self._c.train.samples, self._material.held_out
        examples = parts.learner.examples
        if not (count and rows is not None and rows.chat and examples and parts.model.config.load):
            return None
        asks = self._group.first or self._group.strategy == "fsdp"
        some = chosen(examples(rows, count), count, parts.model.context_length) if asks else []
        words = load_tokenizer(self._material.tokenizer) if some else None
        folder = self._c.folder if self._group.first else ""
        return SampleLog(folder, some, words, self._voice.say_once) if words is not None else None

    def _measure(self, rows: Rows) -> Validation:
        parts, tokens = self._parts, self._c.train.eval_tokens
        return parts.learner.measure(parts.wrapped, rows, self._group, tokens=tokens, micro=parts.micro)

    def meet(self, whole: bool = False) -> None:
        if self._parts.meeting is not None:
            optimizer = self._parts.optimizer
            state = [tensor for _, tensor, _ in optimizer.state()] if whole else []
            self._saver.before_update()  # a snapshot of the step before must be out first
            self._parts.meeting.meet(optimizer.parameters, state)

    def meta(self, done: int) -> dict[str, Any]:
        start, material = self._start, self._material
        samples = start.course.of_step(done - start.position.step - 1)[1]
        position = resume.Position(done, samples, self.tokens, self.best, self._waited, self._skipped)
        shape, words = self._parts.model.config, material.tokenizer_digest
        found = resume.meta(position, start.data, shape, words, self._c.optim.kind)
        found["batch"] = [self._parts.batch, self._group.world]
        if self._parts.plans is not None:
            found["balance"] = self._parts.plans.told(done)
        if self._parts.adapters is not None:
            found["adapter"] = self._parts.adapters.about
        if self._parts.loss_scale is not None:
            found["loss_scale"] = self._parts.loss_scale.to_json()
        return found

    def summary(self) -> str:
        return f"loss {self.loss:.4f}" + (f", best validation {self.best:.4f}" if self.best is not None else "")

    def close(self) -> None:
        if self._samples is not None:
            self._samples.close()


def sample_log(folder: str, rank: int) -> TextIO:
    """train.log_samples: which samples a rank learned at which step, to prove that none is missed and none comes twice."""
    os.makedirs(folder, exist_ok=True)
    handle = os.open(os.path.join(folder, f"samples-rank-{rank}.jsonl"), APPEND, 0o644)
    return os.fdopen(handle, "a", encoding="utf-8", buffering=1)
