"""Pretraining: text becomes a base model.

    stoker train pretrain --data texts/ --preset small
    torchrun --nproc-per-node 2 -m stoker.training.recipes.pretrain --preset debug --data notes.txt      # works too

Reads top to bottom: settings, data, ranks, model, optimizer, checkpoint, steps, end. docs/config.yaml has every key.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch

import stoker
from stoker.contract import layout, names
from stoker.contract.names import Refusal
from stoker.contract.shape import as_json, replace
from stoker.training.checkpoint.reading import Checkpoint, find, open_checkpoint
from stoker.training.checkpoint.saver import Saver
from stoker.training.config.check import check_data, check_ranks
from stoker.training.config.resolve import recipe_config
from stoker.training.config.schema import Config
from stoker.training.config.yamlform import as_yaml
from stoker.training.data.order import Order
from stoker.training.data.prepare import prepare
from stoker.training.data.prepared import Prepared
from stoker.training.data.reader import Samples
from stoker.training.forensics.inject import Drill, parse
from stoker.training.loop import resume as going_on
from stoker.training.loop import state, trip
from stoker.training.loop.evaluate import validate
from stoker.training.loop.feeder import Course, Feeder, StepBatch
from stoker.training.loop.fit import largest_micro
from stoker.training.loop.loggers import check_loggers
from stoker.training.loop.profiling import Profile
from stoker.training.loop.samplelog import SampleLog
from stoker.training.loop.say import Voice, where_runs_go
from stoker.training.loop.speed import Speed
from stoker.training.loop.stages import Stages
from stoker.training.loop.step import Numbers, Pending, Stepper
from stoker.training.model import hf_config, hf_hub, ready
from stoker.training.model.attention import kernels
from stoker.training.model.config import ModelConfig
from stoker.training.model.decoder import Decoder, flops_per_token
from stoker.training.model.rows import with_rows
from stoker.training.optim import schedule
from stoker.training.optim.optimizer import Optimizer
from stoker.training.parallel.group import Group, wrap
from stoker.training.parallel.split import even_micro, largest_share
from stoker.training.tokenizer.tokenizer import load as load_tokenizer

GRAPH_PARAMETERS = 60_000_000  # below this a step is bound by launches, not by arithmetic: a CUDA graph pays


class Run:
    """What the parts of a run share. Built in order; `train` is the loop."""

    def __init__(self, c: Config, prepared: Prepared, group: Group, stages: Stages) -> None:
        self.c, self.prepared, self.group, self.stages = c, prepared, group, stages
        self.folder = where_runs_go()
        self.dtype = ready.dtype_of(c.compute, group.device)
        if c.compute.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # 15 % of a small step, and we read nothing unwritten
        torch.set_float32_matmul_precision("highest" if c.compute.deterministic or self.dtype == torch.float32 else "high")

        # Data: how many samples a step has, and how many steps there are.
        self.samples = Samples(prepared, "train", c.data.context_length)
        self.held_out = Samples(prepared, "validation", c.data.context_length) if prepared.validation_tokens > 1 else None
        count = min(len(self.samples), c.data.max_samples) if c.data.max_samples else len(self.samples)
        self.order = Order(count, c.data.seed)
        self.batch = self._samples_per_step()
        self.total = 0 if c.train.max_steps else max(round(c.train.epochs * count), 1)
        self.steps = c.train.max_steps or -(-self.total // self.batch)

        # Model, as every rank has it; then wrapped for the ranks together.
        self.shape = self._model_shape()
        with torch.device(group.device):
            self.model = Decoder(self.shape, c.data.context_length, self.dtype)
        self.wrapped: Any = None
        self.voice: Voice

    def _samples_per_step(self) -> int:
        b, context = self.c.batch, self.c.data.context_length
        return b.tokens // context if b.tokens else max(b.micro, 1) * b.accumulation * self.group.world

    def _model_shape(self) -> ModelConfig:
        told = self.c.model
        self.weights = ""
        if told.load:
            self.weights = hf_hub.folder_of(told.load, _quiet)
            told = hf_config.shape_of(self.weights)
            told = replace(told, vocab_size=self.c.model.vocab_size or told.vocab_size, dropout=self.c.model.dropout)
        return with_rows(told, self.prepared.vocab_size)

    def build(self) -> Checkpoint | None:
        """Weights, optimizer, checkpoint. The voice begins here: it must know at which step."""
        c, group = self.c, self.group
        first_words: list[str] = []
        found = self._find(first_words.append)
        if found is not None:
            going_on.check(found.meta, found.path, self.shape, self.prepared, c.optim.kind)
            self.position, line = going_on.position(found.meta, self.prepared, c.data.seed)
            first_words += [f"resumes at step {self.position.step} from {found.path}"] + ([line] if line else [])
        else:
            self.position = going_on.Position(0, 0, None)
        self.voice = voice = Voice(group, self.steps, c.train.log_every, c.train.log_to, as_json(c), self.position.step)
        for words in first_words:
            voice.say_once(words)

        spoils = parse(c.nan.inject)
        compute = replace(c.compute, compile="off", cuda_graphs="off") if spoils else c.compute
        if spoils and ready.compiled(c.compute, group.device):
            voice.say_once("nan.inject: without compilation, so that the drill can reach into the blocks")
        ready.make_ready(self.model, compute, group.device, voice.say_once)
        self.wrapped = wrap(self.model, group, self.dtype)
        if found is None:
            self.model.start(c.train.seed)
            if self.weights:
                from stoker.training.model import hf

                hf.load(self.model, self.weights, voice.say_once)
        self.optimizer = Optimizer(self.model, c.optim)
        self.tensors = state.tensors(self.model, self.optimizer)
        if found is not None:
            found.read_into(self.tensors)
            self.optimizer.set_count(self.position.step)
        self.drill = Drill(spoils, self.model, group.rank)
        size = ready.parameters(self.model)
        self.graph = group.device.type == "cuda" and group.world == 1 and group.strategy == "ddp" and not self.samples.chat and (
            compute.cuda_graphs == "on" or (compute.cuda_graphs == "auto" and size < GRAPH_PARAMETERS)
        )  # fmt: skip
        voice.say_once(f"model: {size:,} parameters, {str(self.dtype)[6:]} on {group.world} × {group.device.type}, {c.parallel.strategy}")
        voice.say_once(f"data: {len(self.samples):,} samples of {c.data.context_length} tokens, {self.batch} a step, {self.steps} steps")
        return found

    def _find(self, say: Any) -> Checkpoint | None:
        """Rank 0 looks and checks every byte; the others take its word."""
        c = self.c.checkpoint
        self.checkpoints = c.folder or os.path.join(self.folder, layout.CHECKPOINTS)
        path = None
        if self.group.first and c.resume != "never":
            if c.resume == "auto":
                best = find(self.checkpoints, say) if os.path.isdir(self.checkpoints) else None
                path = best.path if best else None
            else:
                path = c.resume
        path = self.group.from_first(path)
        return open_checkpoint(path) if path else None

    def fit_micro(self) -> int:
        c, group = self.c, self.group
        share = largest_share(self.batch, group.world)
        micro = c.batch.micro
        if not micro:

            def forward_backward(inputs: torch.Tensor, targets: torch.Tensor) -> None:
                self.wrapped(inputs, targets, torch.zeros((), device=group.device)).backward()

            micro = largest_micro(
                forward_backward, self.optimizer, share=share, context=c.data.context_length, vocabulary=self.shape.vocab_size, device=group.device,
                say=self.voice.say_once,
            )  # fmt: skip
        halvings = int(os.environ.get(names.MICRO_BATCH_HALVINGS, "0"))
        if halvings:
            micro = max(micro >> halvings, 1)
            self.voice.say_once(f"micro-batch halved {halvings} time(s) after running out of GPU memory: {micro}")
        micro = group.smallest(even_micro(share, min(micro, share)))
        if micro > 1:
            stoker.mark("CAN-HALVE-MICRO-BATCH")
        return micro

    def train(self) -> None:
        c, group, voice = self.c, self.group, self.voice
        micro = self.fit_micro()
        saver = Saver(
            self.checkpoints, rank=group.rank, world=group.world, token=group.from_first(os.urandom(4).hex()), say=voice.say, keep=c.checkpoint.keep,
            keep_best=c.checkpoint.keep_best,
        )  # fmt: skip
        stepper = Stepper(
            self.wrapped, self.optimizer, group, seed=c.train.seed, dropout=self.shape.dropout > 0, chat=self.samples.chat, check=c.nan.check,
            before_update=saver.before_update, after_backward=self.drill.spoil_gradients, graph=self.graph,
        )  # fmt: skip
        course = Course(self.batch, self.position.samples, self.total)
        feeder = Feeder(
            self.samples, self.order, course, first_step=self.position.step, steps=self.steps, ranks=group.world, rank=group.rank, micro=micro,
            equal_steps=group.strategy == "fsdp", pinned=group.device.type == "cuda",
        )  # fmt: skip
        loop = Loop(self, saver, stepper, course, micro)
        stoker.mark("POST-MODEL")
        stoker.phase("train")
        try:
            loop.run(feeder)
        finally:
            feeder.close()
        saver.close()  # after an exception the interpreter's end does it, which does not wait for the part of a rank that is gone
        voice.say_once(f"done: {loop.done} steps, loss {loop.loss:.4f}" + (f", best validation {loop.best:.4f}" if loop.best is not None else ""))
        if c.checkpoint.export and loop.done >= self.steps:
            from stoker.training.model import hf

            hf.save(self.model, os.path.join(self.folder, "hf"), tokenizer_folder=self.prepared.tokenizer, say=voice.say_once, write=group.first)


class Loop:
    """The steps. Each one is launched before the numbers of the one before are read."""

    def __init__(self, run: Run, saver: Saver, stepper: Stepper, course: Course, micro: int) -> None:
        self.run_, self.c, self.group, self.voice = run, run.c, run.group, run.voice
        self.saver, self.stepper, self.course, self.micro = saver, stepper, course, micro
        self.first = self.done = run.position.step
        self.loss = float("nan")
        self.tokens = run.position.samples * self.c.data.context_length  # since the beginning of the run, as metrics.jsonl counts them
        self.told_to_stop = False
        self.score: float | None = None  # the newest validation's
        self.best = run.position.best
        self.skipped = False  # a checkpoint was left out, and that was said
        self.busy = False  # somebody's save is under way, as of the last numbers
        self.saved_at, self.saved_step = time.monotonic(), self.done
        self.speed = Speed(flops_per_token(run.shape, self.c.data.context_length), self.group.world, self.group.device)
        self.profile = Profile(self.c.train.profile_steps if self.c.train.profile and self.group.first else 0, run.folder, self.group.device, self.voice.say)
        self.sample_log = SampleLog(run.folder, self.group.rank, run.position.step) if self.c.train.log_samples else None

    def run(self, feeder: Feeder) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        before: tuple[Pending, StepBatch, float] | None = None
        for batch in feeder:
            self.run_.drill.step = batch.step
            share = schedule.share(self.c.optim, batch.step, self.run_.steps)
            pending = self.stepper.step(batch, share, stop=self.told_to_stop, save=self._due(), busy=self.saver.busy())
            self.done = batch.step + 1
            told = self._hear(*before) if before is not None else None
            if batch.step == self.first and self._saves():
                self.saver.prepare_buffers_aside(self.run_.tensors)
            before = (pending, batch, share)
            self.profile.step()
            save = (told is not None and told.save) or (self.c.checkpoint.every_steps > 0 and self.done % self.c.checkpoint.every_steps == 0)
            if (told is None or not told.stop) and (save or self._validation_due()):
                # Its line comes before the validation's, and a checkpoint never counts a step that may not have been finite.
                told = self._hear(*before)
                before = None
            if told is not None and told.stop:
                break
            self.busy = told is not None and told.busy
            if self._validation_due():
                self._validate()
            if save:
                self._save_if_free()
        if before is not None:
            self._hear(*before)
        self.profile.close()
        self._end()

    def _stop(self, number: int, frame: Any) -> None:
        """Ctrl-C or a launcher's stop: all ranks agree on the step, then save."""
        self.told_to_stop = True

    def _due(self) -> bool:
        every = self.c.checkpoint.every
        return self.group.first and every > 0 and not self.saver.busy() and time.monotonic() - self.saved_at >= every

    def _hear(self, pending: Pending, batch: StepBatch, share: float) -> Numbers:
        numbers = pending.read()
        if batch.step == self.first:
            self.run_.stages.done("first step")
            self.voice.say_once(f"first step after {self.run_.stages.said()}")
        if numbers.bad:
            folder = self.run_.folder if self.c.nan.dump else None
            text = load_tokenizer(self.run_.prepared.tokenizer)
            raise trip.explain(
                numbers, batch, self.stepper, self.run_.model, self.run_.wrapped, self.run_.drill, self.group, self.voice, folder=folder, decode=text.decode
            )
        self.loss = numbers.loss
        self.tokens += batch.tokens
        self.speed.step(batch.tokens)
        stoker.beat(step=numbers.step + 1, loss=numbers.loss, tokens=self.tokens)
        if self.sample_log is not None:
            self.sample_log.write(batch.step, batch.ids)
        self.voice.step(numbers, self.c.optim.learning_rate * share, self.speed, self.tokens)
        return numbers

    def _saves(self) -> bool:
        c = self.c.checkpoint
        return c.every > 0 or c.every_steps > 0 or c.at_end

    def _validation_due(self) -> bool:
        every = self.c.train.eval_every
        return every > 0 and self.done % every == 0 and self.done < self.run_.steps and self.run_.held_out is not None

    def _save_if_free(self) -> None:
        """At a step that all ranks know."""
        if not self.busy:
            self._save(wait=False)
        elif not self.skipped:
            self.skipped = True
            self.voice.say_once(f"no checkpoint at step {self.done}, and more may be left out: the one before is still being written; save less often")

    def _validate(self) -> None:
        run = self.run_
        if run.held_out is None:
            return
        stoker.phase("eval")
        ratio = run.prepared.validation_bytes / max(run.prepared.validation_tokens, 1)
        found = validate(run.wrapped, run.held_out, self.group, tokens=self.c.train.eval_tokens, bytes_per_token=ratio, micro=self.micro)
        self.score = found.loss
        self.best = found.loss if self.best is None else min(self.best, found.loss)
        self.voice.say_once(f"Validation after step {self.done} | Loss: {found.loss:.4f} | Bits per byte: {found.bits_per_byte:.4f} | best {self.best:.4f}")
        self.voice.metrics(self.done - 1, val_loss=found.loss, val_bits_per_byte=found.bits_per_byte)
        self.speed.pause()
        stoker.phase("train")

    def _save(self, wait: bool) -> bool:
        run = self.run_
        samples = self.course.of_step(self.done - self.first - 1)[1]
        meta = going_on.meta(going_on.Position(self.done, samples, self.best), run.shape, run.prepared, self.c.optim.kind, self.c.data.seed)
        taken = self.saver.save(self.done, run.tensors, meta, self.score, wait=wait)
        self.saved_at, self.saved_step = time.monotonic(), self.done
        return taken

    def _end(self) -> None:
        if self.done >= self.run_.steps:
            self._validate()
        wanted = self.c.checkpoint.at_end if self.done >= self.run_.steps else True
        if wanted and self.done > self.first:
            stoker.phase("save")
            if not self._save(wait=True):
                self.voice.say_once(f"the last checkpoint could not be written: {self.saver.problem()}")
        if self.sample_log is not None:
            self.sample_log.close()


def main(argv: list[str]) -> int:
    try:
        stages = Stages()
        stages.done("imports")
        c = recipe_config(argv, torch.cuda.is_available(), say=lambda line: print(line, flush=True))
        check_ranks(c, int(os.environ.get("WORLD_SIZE", "1")))
        check_loggers(c.train.log_to)
        ready.environment(c.data.cache)
        on_gpu = torch.cuda.is_available() and c.parallel.device != "cpu"
        compiler = ready.warm_compiler() if on_gpu and c.compute.compile != "off" and not c.nan.inject else None
        prepared = prepare(c.data, c.tokenizer, _quiet)  # `stoker train` has done it: this only opens it. Under torchrun one rank builds, the others wait.
        check_data(c, prepared.train_tokens, prepared.vocab_size)
        stages.done("data")
        group = Group(c.parallel)
        stages.done("ranks")
        run = Run(c, prepared, group, stages)
        if group.first:
            os.makedirs(run.folder, exist_ok=True)
            with open(os.path.join(run.folder, "config.yaml"), "w", encoding="utf-8") as file:
                file.write(as_yaml(c))
        with kernels("flash" if c.compute.deterministic and c.compute.attention == "auto" and group.device.type == "cuda" else c.compute.attention):
            if compiler is not None:
                compiler.join()
            run.build()
            stages.done("model")
            if run.position.step >= run.steps:
                run.voice.say_once(f"nothing to do: {run.position.step} of {run.steps} steps are done")
            else:
                run.train()
        run.voice.close()
        group.close()
    except Refusal as refusal:
        print(f"stoker: {refusal.line}", file=sys.stderr, flush=True)
        return refusal.code
    return 0


def _quiet(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
