"""A run's parts, built in order: data, model, optimizer, micro-batch, checkpoint; then the steps. Every stage that
trains shares it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import torch

import stoker
from stoker.contract import layout, names, redact
from stoker.contract.names import EX_DATAERR, Refusal
from stoker.contract.shape import as_json, replace
from stoker.contract.wholefile import write_whole
from stoker.training.balance import comm
from stoker.training.balance.clock import StepClock
from stoker.training.balance.plan import Plans
from stoker.training.balance.words import local_steps
from stoker.training.checkpoint import folders
from stoker.training.checkpoint.reading import Checkpoint, find, open_checkpoint, verify
from stoker.training.checkpoint.saver import Saver
from stoker.training.config.schema import Config
from stoker.training.config.yamlform import as_yaml
from stoker.training.data.order import Order
from stoker.training.forensics.inject import Drill, parse
from stoker.training.loop import resume as going_on
from stoker.training.loop import state
from stoker.training.loop.feeder import Course, Feeder
from stoker.training.loop.fit import largest_micro
from stoker.training.loop.learner import Learner
from stoker.training.loop.material import Material
from stoker.training.loop.say import Voice, where_runs_go
from stoker.training.loop.stages import Stages
from stoker.training.loop.step import Stepper
from stoker.training.loop.steps import Loop
from stoker.training.model import hf_config, hf_hub, ready
from stoker.training.model.config import ModelConfig
from stoker.training.model.rows import with_rows
from stoker.training.optim.optimizer import Optimizer, local
from stoker.training.parallel.group import Group, shard
from stoker.training.parallel.split import even_micro, largest_share

GRAPH_PARAMETERS = 60_000_000  # below this a step is bound by launches, not by arithmetic: a CUDA graph pays
BEFORE = "before.json"
MANY = 1024  # samples a micro-batch may have where no batch.tokens limits it


class Job:
    def __init__(
        self, c: Config, material: Material, group: Group, stages: Stages, learner: Learner | None = None
    ) -> None:
        self.c, self.material, self.group, self.stages, self.learner = c, material, group, stages, learner or Learner()
        self.folder = where_runs_go(c)
        self.voice = Voice(group, c.train.log_every)
        if group.first:
            os.makedirs(self.folder, 0o700, exist_ok=True)
            write_whole(os.path.join(self.folder, "config.yaml"), redact.whole(as_yaml(c)).encode())
        self.last: Loop | None = None  # once it has run
        self.dtype = ready.dtype_of(c.compute, group.device)
        ready.arithmetic(c.compute, self.dtype)
        self.samples, self.held_out = material.train, material.held_out
        self.order = Order(min(len(self.samples), c.data.max_samples or len(self.samples)), c.data.seed)

    def build(self) -> None:
        c, group, voice = self.c, self.group, self.voice
        weights, self.shape = self._model_shape()
        found = self._find()
        spoils = parse(c.nan.inject)
        compute = replace(c.compute, compile="off", cuda_graphs="off") if spoils else c.compute
        if spoils and c.compute.compile != "off" and group.device.type == "cuda":
            voice.say_once("nan.inject: blocks run as plain torch, so that the drill can reach into them")

        with torch.device(
            "meta" if group.strategy == "fsdp" else group.device
        ):  # sharded: no rank ever holds the whole model
            self.model = self.learner.kind(self.shape, c.data.context_length, self.dtype)
        ready.make_ready(self.model, compute, group.device, voice.say_once)
        if group.strategy == "fsdp":
            shard(self.model, group, self.dtype)
        self.model.place(group.device)
        if found is None:
            self.model.start(c.train.seed)
            if weights:
                self.learner.load(self.model, weights, voice.say_once)
        self.optimizer = Optimizer(self.model, c.optim)
        self.own_micro = self._fit_micro()
        fits = group.all(self.own_micro)
        self.micro: int = min(fits)
        if len(set(fits)) > 1:
            voice.say_once(f"micro-batches of {', '.join(map(str, fits))} samples at most fit the ranks")
        self.batch = self._samples_per_step(found)
        self.plans = Plans(self.batch, group.world) if self._balanced else None
        self.wrapped = comm.wrapped(self.model, group, c.parallel.comm)
        every = local_steps(c.parallel.comm) if group.world > 1 else 0
        self.meeting = comm.Meeting(group, every) if every else None
        self.clock = StepClock(self.model, group.device) if group.world > 1 and group.strategy == "ddp" else None
        self.drill = Drill(spoils, self.model, group.rank)
        self._go_on(found)
        size = ready.parameters(self.model)
        self.graph = self._graph(compute.cuda_graphs, size)
        voice.say_once(
            f"model: {size:,} parameters, {str(self.dtype)[6:]} on {group.world} × {group.device.type},"
            f" {c.parallel.strategy}"
        )
        voice.say_once(
            f"data: {self.order.count:,} samples of {c.data.context_length} tokens, {self.batch} a step, {self.steps}"
            " steps"
        )

    def _model_shape(self) -> tuple[str, ModelConfig]:
        """(folder of the weights to begin with or nothing, shape)."""
        told = self.c.model
        if not told.load:
            return "", with_rows(told, self.material.vocab_size)
        weights = hf_hub.folder_of(told.load, self.voice.say_once)
        loaded = hf_config.shape_of(weights)
        return weights, with_rows(
            replace(loaded, vocab_size=told.vocab_size or loaded.vocab_size, dropout=told.dropout),
            self.material.vocab_size,
        )

    def _find(self) -> Checkpoint | None:
        """Rank 0 looks and checks every byte; the others take its word, or refuse with it."""
        c, voice = self.c.checkpoint, self.voice
        self.checkpoints = os.path.abspath(c.folder or os.path.join(self.folder, layout.CHECKPOINTS))

        # What this run itself has saved, in an attempt before, comes first: `never` or another run's folder says how it
        # began.
        again = bool(c.folder) and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        of_run = going_on.run_of(self.folder) if again and c.resume != "auto" else ""  # others' lie in that folder, too

        def look() -> str | None:
            if (c.resume == "auto" or again or not c.folder) and os.path.isdir(self.checkpoints):
                best = find(self.checkpoints, voice.say, of_run=of_run)
                if best is not None:
                    return best.path
                if not of_run and folders.steps_in(self.checkpoints):
                    voice.say(f"no sound checkpoint in {self.checkpoints}: it begins anew")
            if c.resume in ("auto", "never"):
                return None
            path = going_on.located(c.resume)
            wrong = verify(path)
            if wrong:
                raise Refusal(f"checkpoint.resume {path} is damaged: {wrong[0]}", EX_DATAERR)
            return path

        path = self.group.agreed(look)
        return open_checkpoint(path) if path else None

    @property
    def _balanced(self) -> bool:
        return self.c.parallel.balance == "auto" and self.group.world > 1

    def _fit_micro(self) -> int:
        """Before DDP is around the model: a trial that runs out of memory would leave its exchange half done."""
        c, group = self.c, self.group
        tokens = c.batch.tokens
        micro = c.batch.micro
        share = (
            largest_share(tokens // c.data.context_length, group.world)
            if tokens
            else micro * c.batch.accumulation or MANY
        )
        halvings = int(os.environ.get(names.MICRO_BATCH_HALVINGS, "0"))
        sharded = group.strategy == "fsdp"
        if not micro:
            chat = self.samples.chat

            def forward_backward(inputs: torch.Tensor) -> None:
                segments = torch.zeros_like(inputs, dtype=torch.int32) if chat else None
                targets = (
                    inputs % inputs.shape[1]
                )  # none is left out, and a reward model's, places in their row, are there
                self.model(inputs, targets, torch.zeros((), device=group.device), segments).backward()

            micro = largest_micro(
                forward_backward,
                self.optimizer,
                group,
                share=share,
                context=c.data.context_length,
                vocabulary=self.shape.vocab_size,
                say=self.voice.say_once,
                own=self._balanced,
                halvings=halvings if sharded else 0,
            )
        if halvings:
            micro = max(micro >> halvings, 1) if c.batch.micro or not sharded else micro
            self.voice.say_once(f"micro-batch halved {halvings} time(s) after running out of GPU memory: {micro}")
        if (
            not self._balanced
        ):  # else a plan makes the micro-batch even for the share it gives; this is the most that fits here
            micro = group.smallest(even_micro(share, min(micro, share)))
        if micro > 1:
            stoker.mark("CAN-HALVE-MICRO-BATCH")
        return micro

    def _samples_per_step(self, found: Checkpoint | None) -> int:
        """With micro auto and no tokens it is what fitted at the first start: neither a halving nor fuller cards make
        it another run.
        """
        b, world = self.c.batch, self.group.world
        if b.tokens or b.micro:
            return b.tokens // self.c.data.context_length if b.tokens else b.micro * b.accumulation * world
        stored = found.meta.get("batch") if found is not None else None
        if isinstance(stored, list) and len(stored) == 2 and stored[1] == world:
            return int(stored[0])
        return (self.micro << int(os.environ.get(names.MICRO_BATCH_HALVINGS, "0"))) * b.accumulation * world

    def _go_on(self, found: Checkpoint | None) -> None:
        c = self.c
        self.tensors = state.tensors(self.model, self.optimizer)
        course = going_on.Data(self.material.key, c.data.seed, c.data.context_length, self.order.count)
        self.position = going_on.Position(0, 0, 0, None)
        if found is not None:
            going_on.check(found.meta, found.path, self.shape, self.material, c.optim.kind)
            self.position, line = going_on.position(found.meta, course)
            self.voice.say_once(f"resumes at step {self.position.step} from {found.path}")
            if line:
                self.voice.say_once(line)
            if self.plans is not None and self.plans.go_on(found.meta.get("balance")):
                self.voice.say_once(
                    f"balance: goes on with {', '.join(map(str, self.plans.at(self.position.step).shares))} of"
                    f" {self.batch} samples"
                )
            found.read_into(self.tensors)
            self.optimizer.set_count(self.position.step)
        total = 0 if c.train.max_steps else max(round(c.train.epochs * self.order.count), 1)
        left = max(total - self.position.samples, 0)
        self.steps = c.train.max_steps or self.position.step + -(-left // self.batch)
        self.course, self.data = Course(self.batch, self.position.samples, total), course
        self.voice.begin(self.folder, self.steps, c.train.log_to, as_json(c), self.position.step)

    def _graph(self, told: str, size: int) -> bool:
        possible = (
            self.group.device.type == "cuda"
            and self.group.world == 1
            and self.group.strategy == "ddp"
            and not self.samples.chat
        )
        # Before torch 2.10 or so the random state that dropout needs again in a recomputation can't be asked for in a
        # capture.
        possible = possible and not (self.shape.dropout and self.c.compute.recompute in ("selective", "full"))
        possible = possible and self.model.loss != "liger"  # counts its labels on the host, which no capture can hold
        if told == "on" and not possible:
            line = (
                "compute.cuda_graphs on: not with several ranks, fsdp, chat data, a drill, liger's loss, or dropout"
                " that is recomputed"
            )
            self.voice.say_once(f"{line}; steps are launched kernel by kernel")
        return possible and (told == "on" or (told == "auto" and size < GRAPH_PARAMETERS))

    def train_or_finish(self) -> int:
        """The steps that are left, if any are."""
        if self.position.step < self.steps:
            return self.train()
        self.voice.say_once(f"nothing to do: {self.position.step} of {self.steps} steps are done")
        self.export_if_missing()
        return 0

    def settle(self) -> None:
        """DDP rebuilds its buckets after the first backward: without two steps for nothing, the first one after a
        resume would add in another order.
        """
        if not self.c.compute.deterministic or self.group.world < 3 or self.group.strategy != "ddp":
            return
        inputs = torch.zeros(self.micro, self.c.data.context_length, dtype=torch.int64, device=self.group.device)
        for _ in range(2):
            self.wrapped(inputs, inputs, torch.zeros((), device=self.group.device)).backward()
        self.optimizer.zero()

    def train(self) -> int:
        """Gives the exit code."""
        c, group = self.c, self.group
        saver = self._saver()
        stepper = Stepper(
            self.wrapped,
            self.optimizer,
            group,
            seed=c.train.seed,
            dropout=self.shape.dropout > 0,
            chat=self.samples.chat,
            check=c.nan.check,
            before_update=saver.before_update,
            after_backward=self.drill.spoil_gradients,
            graph=self.graph,
            look=self._look() if c.train.debug else None,
            clock=self.clock,
            meeting=self.meeting,
        )
        self.settle()
        self._measure_first()
        feeder = Feeder(
            self.samples,
            self.order,
            self.course,
            first_step=self.position.step,
            steps=self.steps,
            ranks=group.world,
            rank=group.rank,
            micro=self.own_micro if self.plans else self.micro,
            equal_steps=group.strategy == "fsdp",
            pinned=group.device.type == "cuda",
            plans=self.plans,
        )
        loop = Loop(self, saver, stepper)
        stoker.mark("POST-MODEL")
        stoker.phase("train")
        try:
            loop.run(feeder)
        finally:
            feeder.close()
        # after an exception the interpreter's end does it, which does not wait for the part of a rank that is gone
        saver.close()
        self.last = loop
        if loop.done >= self.steps:
            self.export()
        return loop.code

    @property
    def whole(self) -> bool:
        """Whether the run has come to its end, in this attempt or one before."""
        return self.position.step >= self.steps or (self.last is not None and self.last.done >= self.steps)

    def _measure_first(self) -> None:
        """Kept in a file of its own: the run may go on in another attempt, where the beginning is gone."""
        if not self.c.train.eval_first or self.position.step or self.held_out is None:
            return
        found = self.learner.measure(
            self.wrapped, self.held_out, self.group, tokens=self.c.train.eval_tokens, micro=self.micro
        )
        self.voice.say_once(f"Validation before the first step | Loss: {found.loss:.4f}")
        if self.group.first:
            told = {
                "schema": layout.SCHEMA,
                "val_loss_before": found.loss,
                "val_bits_per_byte_before": found.bits_per_byte,
            }
            write_whole(os.path.join(self.folder, BEFORE), json.dumps(told).encode())

    def _saver(self) -> Saver:
        """Rank 0 takes the folder first: if it can't, all refuse with its line, and nobody waits for anybody."""
        c, group = self.c.checkpoint, self.group
        token = group.from_first(os.urandom(4).hex())
        made: list[Saver] = []

        def make() -> None:
            saver = Saver(
                self.checkpoints,
                rank=group.rank,
                world=group.world,
                token=token,
                say=self.voice.say,
                keep=c.keep,
                keep_best=c.keep_best,
            )
            made.append(saver)

        group.agreed(make)
        if not group.first:
            make()
        return made[0]

    def _look(self) -> Callable[[int], None]:
        """train.debug: where the largest gradient and weight are, at every step. It waits for the GPU."""
        named = dict(self.model.named_parameters())

        def largest(of: Callable[[Any], torch.Tensor]) -> str:
            found = {
                name: float(of(p).abs().max()) for name, p in named.items() if p.grad is not None and of(p).numel()
            }
            name = max(found, key=lambda one: found[one])
            return f"{found[name]:.3e} in {name}"

        def look(step: int) -> None:
            self.voice.say(
                f"Debug [{step}] | largest gradient {largest(lambda p: local(p.grad))} | largest weight"
                f" {largest(lambda p: local(p.detach()))}"
            )

        return look

    def export(self) -> None:
        where = os.path.join(self.folder, "hf")
        if self.c.checkpoint.export:
            self.learner.save(self.model, where, self.material.tokenizer, self.voice.say_once, self.group.first)

    def export_if_missing(self) -> None:
        """A run that was killed between its last checkpoint and its export."""
        if not self.group.from_first(os.path.isdir(os.path.join(self.folder, "hf"))):
            self.export()
