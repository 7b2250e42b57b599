"""The middle of every recipe that learns from rows (pretrain, midtrain, sft, reward, dpo): model, optimizer, steps, export."""

from __future__ import annotations

import os
from contextlib import closing
from typing import Any

from stoker.contract.shape import as_json, shape
from stoker.training.config.schema import Config
from stoker.training.data.order import order_of
from stoker.training.loop.feeder import Feeder
from stoker.training.loop.keeping import Keeper, newest, tensors_of
from stoker.training.loop.learner import Learner
from stoker.training.loop.material import Material
from stoker.training.loop.run import Loop
from stoker.training.loop.say import Voice
from stoker.training.loop.speed import Profile, Startup
from stoker.training.loop.step import Stepper
from stoker.training.loop.supervised import Launched, Parts, Settings, Supervised
from stoker.training.model import ready
from stoker.training.optim.config import rate_share
from stoker.training.parallel.group import Group
from stoker.training.recipes import build, stage


@shape
class Trained:
    code: int  # the exit code
    whole: bool  # the run has come to its end, in this attempt or one before
    parts: Parts
    metrics: dict[str, Any]


def train(c: Config, material: Material, learner: Learner, group: Group, voice: Voice, startup: Startup) -> Trained:
    folder = stage.run_directory(c, group)
    order = order_of(c.data, len(material.train), material.entries)

    # Model, optimizer, micro-batch; the weights and the step of a checkpoint, if there is one.
    found = newest(c.checkpoint, folder, group, voice)
    parts = build.parts_of(c, material, learner, group, voice, found)
    tensors = tensors_of(parts.model, parts.optimizer)
    start = build.start_of(c, parts, order, tensors, found, voice)
    first, steps = start.position.step, start.steps
    voice.begin(folder, steps, c.train.log_to, as_json(c), first)
    size, device = ready.parameters(parts.model), group.device
    voice.say_once(
        f"model: {size:,} parameters, {str(parts.model.dtype)[6:]} on {group.world} × {device.type},"
        f" {c.parallel.strategy}"
    )
    voice.say_once(
        f"data: {order.count:,} samples of {c.data.context_length} tokens, {parts.batch} a step, {steps} steps"
    )
    startup.done("model")
    if first >= steps:
        voice.say_once(f"nothing to do: {first} of {steps} steps are done")
        if not group.from_first(os.path.isdir(os.path.join(folder, "hf"))):
            export(c, parts, folder, voice)  # it was killed between its last checkpoint and its export
        return Trained(0, True, parts, stage.learned(folder, steps, start.position.tokens))

    # The steps.
    keeper = Keeper(c.checkpoint, folder, group, voice, tensors, keep_best=c.checkpoint.keep_best)
    stepper = Stepper(
        parts.wrapped,
        parts.optimizer,
        group,
        seed=c.train.seed,
        dropout=parts.model.config.dropout > 0,
        chat=material.train.chat,
        check=c.nan.check,
        before_update=keeper.saver.before_update,
        after_backward=parts.drill.spoil_gradients,
        graph=parts.graph,
        look=build.debug_line(parts.model, voice) if c.train.debug else None,
        clock=parts.clock,
        meeting=parts.meeting,
    )
    build.settle(c, parts)
    keep_best = c.checkpoint.keep_best and keeper.wanted
    told = Settings(folder, c.train, c.optim, c.parallel.comm, c.nan.dump, keep_best)
    task = Supervised(parts, start, told, stepper, keeper.saver, voice, startup)
    profile = Profile(c.train.profile_steps if c.train.profile and group.first else 0, folder, device, voice.say)
    loop = Loop(task, keeper, group, voice, profile, first=first, steps=steps)
    task.begin()
    micro = parts.own_micro if parts.plans else parts.micro
    rows, plans = material.train, parts.plans
    feeder = Feeder(rows, order, start.course, group, steps=range(first, steps), micro=micro, plans=plans)
    with closing(feeder.batches()) as batches:
        for batch in loop.over(batches):
            parts.drill.step = batch.step
            share = rate_share(c.optim, batch.step, steps)
            pending = stepper.step(batch, share, words=loop.words)  # forward, backward, update
            rate = c.optim.learning_rate * share
            loop.launched(Launched(pending, batch, rate, parts.learner.numbers(parts.model)))
    task.close()
    if loop.whole:
        export(c, parts, folder, voice)
    return Trained(loop.code, loop.whole, parts, stage.learned(folder, loop.done, task.tokens))


def export(c: Config, parts: Parts, folder: str, voice: Voice) -> None:
    if c.checkpoint.export:
        where = os.path.join(folder, "hf")
        words = parts.material.tokenizer
        beside = stage.beside(c, words, parts.material.tokenizer_digest, folder, parts.material.train.chat)
        parts.learner.save(parts.model, where, beside, voice.say_once, parts.group.first)
