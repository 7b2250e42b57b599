"""The middle of every recipe that learns from rows (pretrain, midtrain, sft, reward, dpo): model, optimizer, steps, export."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from typing import Any, cast

from torch import Tensor

from stoker.contract.frozen import as_json, frozen
from stoker.contract.units import plural
from stoker.training.config.schema import Config
from stoker.training.data.order import order_of
from stoker.training.evaluate.confidence import wilson
from stoker.training.fit.terms import SFT
from stoker.training.loop.feeder import Feeder, Material
from stoker.training.loop.keeping import Keeper, best_in, newest, opened, tensors_of
from stoker.training.loop.learner import Learner
from stoker.training.loop.run import Loop
from stoker.training.loop.say import Voice
from stoker.training.loop.speed import Profile, Startup
from stoker.training.loop.step import Parts, Stepper
from stoker.training.loop.supervised import Launched, Settings, Supervised
from stoker.training.model import adapters, outside_adapters, ready
from stoker.training.model.attention import kernels
from stoker.training.model.outside import Outside
from stoker.training.optim.config import rate_share
from stoker.training.parallel.group import Group
from stoker.training.recipes import build, stage
from stoker.training.recipes import memory as memory_plan
from stoker.training.reward.pairs import Pair, PairRows, pairs_of
from stoker.training.tokenizer import chat


@frozen
class Trained:
    code: int  # the exit code
    whole: bool  # the run has come to its end, in this attempt or one before
    parts: Parts
    metrics: dict[str, Any]


def train(
    c: Config, material: Material, learner: Learner, group: Group, voice: Voice, startup: Startup, stage_name: str = SFT
) -> Trained:  # fmt: skip
    """`stage_name`: pretrain and midtrain make the steps of sft."""
    folder = stage.run_directory(c, group)
    order = order_of(c.data, len(material.train), material.entries)

    # Model, optimizer, micro-batch; the weights and the step of a checkpoint, if there is one.
    found = newest(c.checkpoint, folder, group, voice)
    parts = build.parts_of(c, material, learner, group, voice, found, stage_name)
    tensors = tensors_of(parts.model, parts.optimizer)
    start = build.start_of(c, parts, order, tensors, found, voice)
    first, steps = start.position.step, start.steps
    voice.begin(folder, steps, c.train.log_to, as_json(c), first)
    size, device = ready.parameters(parts.model), group.device
    voice.say_once(
        f"model: {plural(size, 'parameter')}, {str(parts.model.dtype)[6:]} on {group.world} × {device.type},"
        f" {c.parallel.strategy}"
    )
    voice.say_once(
        f"data: {plural(order.count, 'sample')} of {c.data.context_length} tokens, {parts.batch} a step, {plural(steps, 'step')}"
    )
    memory = memory_plan.of_rows(c, stage_name, parts, folder, voice)
    memory.begin()
    startup.done("model")
    if first >= steps:
        voice.say_once(f"nothing to do: {first} of {steps} steps are done")
        if not group.from_first(os.path.isdir(os.path.join(folder, "hf"))):
            export(c, parts, folder, voice)  # it was killed between its last checkpoint and its export
        return Trained(0, True, parts, stage.learned(folder, steps, start.position.tokens))

    # The steps.
    keeper = Keeper(c.checkpoint, folder, group, voice, tensors, keep_best=c.checkpoint.keep_best)
    look = build.debug_line(parts.model, voice) if c.train.debug else None
    stepper = Stepper(parts, c.train.seed, check=c.nan.check, before_update=keeper.saver.before_update, look=look)
    build.settle(c, parts)
    keep_best = c.checkpoint.keep_best and keeper.wanted
    told = Settings(folder, c.train, c.optim, c.parallel.comm, c.nan.dump, keep_best)
    task = Supervised(parts, start, told, stepper, keeper.saver, voice, startup, memory.planned_bytes)
    profile = Profile(c.train.profile_steps if c.train.profile and group.first else 0, folder, device, voice.say)
    loop = Loop(task, keeper, group, voice, profile, first=first, steps=steps)
    loop.listen()
    task.begin(lambda: loop.stopping)
    micro = parts.own_micro if parts.plans else parts.micro
    rows, plans = material.train, parts.plans
    feeder = Feeder(rows, order, start.course, group, steps=range(first, steps), micro=micro, plans=plans)
    with closing(feeder.batches()) as batches, memory.watched():
        for batch in loop.over(batches):
            parts.drill.step = batch.step
            share = rate_share(c.optim, batch.step, steps)
            pending = stepper.step(batch, share, words=loop.words)  # forward, backward, update
            rate = c.optim.learning_rate * share
            loop.launched(Launched(pending, batch, rate, parts.learner.numbers(parts.model)))
    memory.end(task.tokens_per_s, stepper.peak_before_graphs)
    task.close()
    if task.out_of_patience:
        take_best(keeper, tensors, group, voice)
    if loop.whole:
        export(c, parts, folder, voice)
    return Trained(loop.code, loop.whole, parts, stage.learned(folder, loop.done, task.tokens))


def take_best(keeper: Keeper, tensors: dict[str, Tensor], group: Group, voice: Voice) -> None:
    """After a stop by train.patience: the weights of the checkpoint with the lowest validation loss."""
    path = group.agreed(lambda: best_in(keeper.folder))
    if path is None:
        voice.say_once("no checkpoint has a validation loss: the last weights are exported, not the best")
        return
    found = opened(path, group)
    found.read_into(tensors)
    voice.say_once(f"back to the best checkpoint: {path}, validation loss {found.score:.4f}")


@frozen
class PairStage:
    """What a stage that learns from pairs of answers says besides."""

    name: str
    line: str  # what the held-out pairs are that it got right
    learner: Callable[[Config, int, Group, Voice], Learner]  # with the tokenizer's size
    measure: Callable[[Config, Parts, PairRows], tuple[list[bool], dict[str, Any]]]  # which are right, and what else
    answers: bool = False  # rows tell an answer's tokens from its prompt's


def learn_pairs(argv: list[str], kind: PairStage) -> int:
    startup = Startup()
    startup.done("imports")
    c = stage.settings(argv, kind.name)

    # Pairs: read by every rank, before there is a process group.
    tokenizer, given, context = stage.tokenizer_of(c), getattr(c, kind.name), c.data.context_length
    pairs, held_out = pairs_of(given.pairs, given.held_out, tokenizer, context, kind.name, stage.from_rank_0)
    train_rows, other = (
        PairRows(some, context, chat.pad_id(tokenizer), answers=kind.answers) for some in (pairs, held_out)
    )
    startup.done("data")

    group = Group(c.parallel)
    startup.done("ranks")
    folder = stage.tokenizer_folder(c)
    material = Material(train_rows.digest(), tokenizer.vocab_size, folder, tokenizer.digest, train_rows, other)
    voice = Voice(group, c.train.log_every)
    with kernels(ready.attention(c.compute, group.device)):
        learner = kind.learner(c, tokenizer.vocab_size, group, voice)
        trained = train(c, material, learner, group, voice, startup, kind.name)
        if trained.whole:
            right, more = kind.measure(c, trained.parts, other)
            if group.first:
                told = {**_shares(held_out, right), **more}
                voice.say(
                    f"{kind.line}: {told['accuracy']:.1%} ({told['low']:.1%} – {told['high']:.1%}) of {told['total']}"
                )
                exported = kind.name == "reward" or c.checkpoint.export
                stage.finish(c, kind.name, {**trained.metrics, **told}, model="hf" if exported else None)
    voice.close()
    group.close()
    return trained.code


def _shares(pairs: list[Pair], right: list[bool]) -> dict[str, Any]:
    by_kind: dict[str, list[bool]] = {}
    for pair, first in zip(pairs, right, strict=True):
        by_kind.setdefault(pair.kind, []).append(first)
    return {**_share(right), "by_kind": {kind: _share(some) for kind, some in sorted(by_kind.items())}}


def _share(right: list[bool]) -> dict[str, Any]:
    sure = wilson(sum(right), len(right))
    return {"accuracy": sum(right) / len(right), "low": sure.low, "high": sure.high, "total": len(right)}


def export(c: Config, parts: Parts, folder: str, voice: Voice) -> None:
    if c.checkpoint.export:
        where = os.path.join(folder, "hf")
        words = parts.material.tokenizer
        beside = stage.beside(c, words, parts.material.tokenizer_digest, folder, parts.material.train.chat)
        own, model, first = parts.adapters, cast(Any, parts.model), parts.group.first
        if own is not None and isinstance(model, Outside):
            if first:
                outside_adapters.save(model, own.settings, own.base, where, beside, voice.say_once)
            return
        if own is not None:
            adapters.save(model, own.settings, own.base, where, beside, voice.say_once, first)
            return
        parts.learner.save(parts.model, where, beside, voice.say_once, parts.group.first)
