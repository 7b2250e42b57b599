"""GRPO: the model answers each prompt several times and learns from which of its answers were right.

    stoker train grpo --model.load sft/hf --grpo.prompts prompts.jsonl --max-steps 60
    stoker train grpo --model.load sft/hf --grpo.prompts prompts.jsonl --grpo.weights density/weights.jsonl --grpo.reward_model reward/hf
    stoker train grpo --model.load sft/hf --grpo.prompts prompts.jsonl --grpo.reward rewards.py:score --grpo.reward length=0.1
    stoker train grpo --model.load sft/hf --grpo.prompts rows.jsonl --grpo.rollout game.py:rollout

Reads top to bottom: settings, prompts, ranks, model, reference, steps. rl/ has a file for each idea: update.py has
the formula and the learning; loop/run.py saves and stops.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import stoker
from stoker.contract import env_vars
from stoker.contract.env_vars import API_KEY
from stoker.contract.errors import EX_CONFIG, EX_SOFTWARE, Refusal, parsing
from stoker.contract.frozen import as_json
from stoker.contract.units import format_bytes, plural
from stoker.training.config.schema import Config
from stoker.training.fit.memory import CACHE, COPY, REFERENCE, SCORER
from stoker.training.fit.terms import GRPO, StageNeeds
from stoker.training.loop.keeping import Keeper, newest, tensors_of
from stoker.training.loop.learner import Learner
from stoker.training.loop.run import Loop
from stoker.training.loop.say import Voice
from stoker.training.loop.speed import Profile
from stoker.training.model import adapters, hf_config, hf_hub, ready
from stoker.training.model.config import with_rows
from stoker.training.model.decoder import Decoder
from stoker.training.model.pieces import give_back
from stoker.training.model.reference import Beginning, Reference, copied
from stoker.training.optim.config import rate_share
from stoker.training.optim.loss_scale import scale_for
from stoker.training.optim.optimizer import Optimizer
from stoker.training.parallel.group import Group
from stoker.training.recipes import build, stage
from stoker.training.recipes.memory import Holding, MemoryRecord, bytes_of, of_grpo
from stoker.training.reward.model import RewardModel, open_reward, scores
from stoker.training.rl import rollout as asking
from stoker.training.rl.asking import Patient, ServerFailed
from stoker.training.rl.config import GROUP, IN_FOLDER, MICRO
from stoker.training.rl.dialects import Wanted
from stoker.training.rl.kept import Kept
from stoker.training.rl.parts import lacking, parts_of
from stoker.training.rl.publish import Publisher, Say, To
from stoker.training.rl.remote import OtherWeights, Servers, addresses_of
from stoker.training.rl.rollout import Answer, Asking, Rollout
from stoker.training.rl.rollout_hook import RolloutHook, prompts_of
from stoker.training.rl.sampler import Sampler
from stoker.training.rl.scoring import RewardFailed, Rewards, RolloutLog, Worker, columns_of
from stoker.training.rl.sending import Sender
from stoker.training.rl.server_match import Unanswered, WeightsCheck, own_logprobs
from stoker.training.rl.task import GrpoTask, Launched, Stopped, result, resumed
from stoker.training.rl.update import Updater, advantages
from stoker.training.rl.waiting import ServerWait, StopRequested
from stoker.training.tokenizer.tokenizer import Tokenizer
from stoker.training.tokenizer.tokenizer import load as load_tokenizer

CHECK_EVERY, CHECK_TOKENS = 25, 256  # steps between two looks at the servers' weights, and tokens of the test prompt


def reward_model_of(c: Config, tokenizer: Tokenizer, device: torch.device) -> RewardModel | None:
    """Where one is given."""
    folder = c.grpo.reward_model
    if not folder:
        return None
    if load_tokenizer(hf_config.tokenizer_in(hf_hub.folder_of(folder, lambda line: None))).digest != tokenizer.digest:
        raise Refusal(
            f"grpo.reward_model {folder} has another tokenizer than model.load: its scores would be wrong",
            EX_CONFIG,
        )
    return open_reward(folder, c.data.context_length, c.compute, device)


def policy_of(
    c: Config, weights: str, own: adapters.Beside | None, group: Group, voice: Voice
) -> tuple[Decoder, Reference | None, Decoder | None]:
    """(what learns, what it began with, that as a model of its own in the activations' dtype; None: adapters learn)."""
    hf_config.check_trainable(weights, c.adapter.method)
    dtype = build.dtype_of(c, group)
    if own is not None:
        ready.arithmetic(c.compute, dtype)
        if c.grpo.kl > 0:
            build.check_beginning(own, group.strategy == "fsdp")
        model = build.adapted(c, own, hf_config.shape_of(weights), Decoder, dtype, group, voice, "hidden")
        return model, Beginning(model, loaded=own.loaded) if c.grpo.kl > 0 else None, None
    if group.strategy == "fsdp":
        ready.arithmetic(c.compute, dtype)
        model = stage.open_in_shards(c, weights, group, dtype, learns=True)
        copy = stage.open_in_shards(c, weights, group, dtype, learns=False) if c.grpo.kl > 0 else None
        return model, None if copy is None else functools.partial(_passing, copy), copy
    model = stage.open_model(c, weights, group.device, dtype=dtype)
    ready.make_ready(model, c.compute, group.device, voice.say_once)
    if c.grpo.kl <= 0:
        return model, None, None
    copy = stage.open_model(c, weights, group.device, dtype=dtype, say=_again).to(model.dtype).requires_grad_(False)
    ready.make_ready(copy, c.compute, group.device, voice.say_once)
    return model, copied(copy), copy


def _again(_: str) -> None:
    """Where the reference's weights are from: the model's line has told."""


@contextmanager
def _passing(model: Decoder) -> Iterator[Decoder]:
    """No backward pass gives its outermost weights back."""
    yield model
    give_back(model)


def memory_of(
    c: Config, own: adapters.Beside | None, held: Holding, judge: RewardModel | None, rollout: Rollout | RolloutHook,
    folder: str, voice: Voice,
) -> MemoryRecord:  # fmt: skip
    world, how = held.group.world, c.generate
    needs = StageNeeds(
        GRPO, reference=c.grpo.kl > 0, loaded=own is not None and own.loaded, rows=how.rows, new_tokens=how.new_tokens,
        length=rollout.sampler.length, answers=-(-c.grpo.prompts_per_step // world) * c.grpo.group * world,
        updates=c.grpo.updates, bits=4 if how.bits == "4" else 16, scorer=judge.config if judge is not None else None,
        scorer_likelihood=judge is not None and judge.likelihood,
    )  # fmt: skip
    return of_grpo(c, own, held, needs, folder, voice)


def publisher_of(
    c: Config, model: Decoder, own: adapters.Beside | None, run: str, group: Group, say: Say, wait: ServerWait
) -> Publisher | Sender:
    """Other servers than Stoker's load folders: they say nothing of shared memory."""
    ask = Patient(os.environ.get(API_KEY, ""), c.grpo.server_timeout, wait)
    how = c.grpo.publish if c.grpo.server_kind == "stoker" else IN_FOLDER
    to = To(addresses_of(c.grpo.server, os.environ), how, c.grpo.staleness, ask, wait, say)
    if how == GROUP:
        return Sender(model, own, group, to, c.grpo.server_timeout)
    return Publisher(model, own, run, group, to)


def servers_of(
    c: Config, wanted: Wanted, publish: Publisher | Sender, kept: Kept, group: Group, wait: ServerWait
) -> Servers:
    addresses, key = addresses_of(c.grpo.server, os.environ), os.environ.get(API_KEY, "")
    more: dict[str, Any] = {"staleness": c.grpo.staleness, "patience_s": c.grpo.server_timeout, "kept": kept}
    more |= {"kind": c.grpo.server_kind, "together": group.all if isinstance(publish, Sender) else None}
    return Servers(addresses, key, wanted, publish, wait=wait, **more)


def wanted_of(c: Config, tokenizer: Tokenizer, longest: int) -> Wanted:
    how, stop = c.generate, frozenset(tokenizer.stop_ids)
    return Wanted(how.new_tokens, how.temperature, stop, tokenizer.vocab_size, longest + how.new_tokens)


class WeightsChecks:
    """Whether each server says what the model that learns does of a test prompt."""

    def __init__(self, addresses: Sequence[str], ids: Sequence[int], key: str, wait: ServerWait) -> None:
        self._ids, self._wait = tuple(ids), wait
        self._checks = [WeightsCheck(address, "", self._ids, key) for address in addresses]

    def __call__(self, model: Decoder, group: Group, voice: Voice) -> None:
        """All ranks call it; raises OtherWeights on all."""
        own = own_logprobs(model, self._ids)
        line = ""
        for check in self._checks if group.first else ():
            try:
                line = line or self._wait.call(lambda check=check: check(own))  # type: ignore[misc]
            except Unanswered as problem:
                voice.say(f"the servers' weights could not be checked: {problem}")
            except StopRequested:
                break  # the step's completions are here: it is learned, and the run ends behind it
        if line := group.from_first(line):
            raise OtherWeights(line)


def writer(bits: str, merged_bytes: int) -> str:
    """Who writes the answers where adapters learn, in words. `merged_bytes`: of weights in 16 bits with adapters in them."""
    size = format_bytes(merged_bytes)
    if bits != "4":
        return f"a copy of the weights with the adapters merged into it: {size}"
    rest = f"; those that have no whole blocks in a row by a 16-bit copy: {size}" if merged_bytes else ""
    return f"the weights in 4 bits{rest}"


def main(argv: list[str]) -> int:
    # Settings, refused here where they can't work.
    c = stage.settings(argv, "grpo")
    micro = max((c.batch.micro or MICRO) >> int(os.environ.get(env_vars.MICRO_BATCH_HALVINGS, "0")), 1)
    weights, tokenizer = stage.weights_of(c.model.load), stage.tokenizer_of(c)

    # Prompts as token ids, what an answer to them is worth, and how often each is sampled.
    rows = stage.rows_of(c.grpo.prompts, "grpo.prompts")
    parts = parts_of(c.grpo)
    left_out: list[str] = []
    if c.grpo.rollout:
        prompts = prompts_of(rows, c.grpo.prompts, lacking(parts))
    else:
        prompts, left_out = asking.read(
            rows, tokenizer, c.data.context_length - c.generate.new_tokens, c.grpo.prompts, c.generate.system,
            lacking(parts),
        )  # fmt: skip
    apart = [part for part in parts if part.apart]
    worker = Worker(apart, columns_of(rows), c.grpo.reward_timeout) if apart else None
    prompts = prompts[: c.data.max_samples or None]
    draw = asking.draw_of(
        stage.rows_of(c.grpo.weights, "grpo.weights") if c.grpo.weights else None, prompts, len(rows), c.grpo.weights
    )
    # train.epochs counts prompts that were sampled.
    steps = c.train.max_steps or max(-(-round(c.train.epochs * len(prompts)) // c.grpo.prompts_per_step), 1)

    # Ranks.
    group = Group(c.parallel)
    # A GRPO step takes seconds, so a metrics line for each of them costs nothing.
    voice = Voice(group, c.train.log_every, metrics_every=1)
    for line in left_out:
        voice.say_once(line)
    folder = stage.run_directory(c, group)

    # Model and optimizer. The reference: the model it all begins with. The reward model, where there is one.
    own = build.adapters_of(c, voice)
    model, reference, copy = policy_of(c, weights, own, group, voice)
    with_rows(model.config, tokenizer.vocab_size)
    build.warn_of_idle_ranks(c.grpo.prompts_per_step, "prompt", "grpo.prompts_per_step", group, voice)
    optimizer = Optimizer(model, c.optim, group.visited)
    build.lock_memory(model, optimizer, group, voice)
    judge = reward_model_of(c, tokenizer, group.device)
    scorer = None if judge is None else functools.partial(scores, judge, tokenizer, device=group.device, micro=micro)
    rewards = Rewards(parts, rows, c.generate.new_tokens, worker, scorer)

    # Where a checkpoint left them, if there is one.
    found = newest(c.checkpoint, folder, group, voice)
    position, history = resumed(found, c.optim.kind, c.grpo)
    if found is not None:
        adapters.check_same(found.meta.get("adapter"), own, found.path)
    tensors = tensors_of(model, optimizer)
    keeper = Keeper(c.checkpoint, folder, group, voice, tensors, keep_best=False)
    scale = scale_for(model.dtype, group.device)  # of fp16
    updater = Updater(
        model,
        reference,
        optimizer,
        group,
        c.grpo,
        temperature=c.generate.temperature,
        micro=micro,
        attention=ready.attention(c.compute, group.device),
        before_update=keeper.saver.before_update,
        loss_scale=scale,
        exchange_each=group.strategy == "fsdp" and c.parallel.accumulate != "whole",
    )
    updater.settle()
    if found is not None:
        found.read_into(tensors)
        voice.say_once(f"resumes at step {position.step} from {found.path}")
        if scale is not None:
            with parsing(f"checkpoint {found.path}"):
                scale.go_on(found.meta.get("loss_scale"))
    updater.resume(position.updates)
    voice.begin(folder, steps, c.train.log_to, as_json(c), position.step)

    # The steps: sample prompts, write answers (here, or by a server), judge them, learn.
    longest = max(len(prompt.ids) for prompt in prompts)
    if c.grpo.rollout:  # its sequences may be as long as the context
        longest = max(c.data.context_length - c.generate.new_tokens, 1)
    wait = ServerWait(lambda: loop.stopping, stoker.phase, voice.say if group.local == 0 else None)
    publish = publisher_of(c, model, own, folder, group, voice.say_once, wait) if c.grpo.server else None
    sampler: Sampler
    checks: WeightsChecks | None = None
    kept: Kept | None = None
    if publish is not None:
        wanted = wanted_of(c, tokenizer, longest)
        kept = Kept(folder, group.rank, wanted.settings)
        if kept.count:
            voice.say_once(
                f"{kept.count} answers that came before are here: what is not learned yet is not asked for again"
            )
        sampler = servers_of(c, wanted, publish, kept, group, wait)
        ids = tuple(max((prompt.ids for prompt in prompts), key=len)[:CHECK_TOKENS])
        ids = ids or tuple(tokenizer.encode(str(prompts[0].asked))[:CHECK_TOKENS])  # of grpo.rollout
        if c.grpo.server_kind != "vllm":  # which is asked for an adapter's version by its name
            key = os.environ.get(API_KEY, "")
            checks = WeightsChecks(addresses_of(c.grpo.server, os.environ), ids, key, wait)
    else:
        sampler = asking.in_trainer(model, tokenizer, longest, c.generate, c.grpo, group)
    words = stage.tokenizer_folder(c)
    rollout: Rollout | RolloutHook
    if c.grpo.rollout:
        rollout = RolloutHook(
            sampler, tokenizer, words, c.grpo, group, rows, c.generate, voice.say, lambda: loop.stopping
        )
    else:
        rollout = Rollout(sampler, tokenizer, tokenizer.stop_ids, c.grpo.group, group)
    ask = Asking(prompts, draw, rollout, rewards, c.grpo, group, steps)
    about = {
        "optimizer": c.optim.kind,
        "model": as_json(model.config),
        "data": {"context": c.data.context_length},
        "tokenizer_digest": tokenizer.digest,
        "tokenizer": os.path.abspath(words) if os.path.isdir(words) else None,
    }
    if own is not None:
        about["adapter"] = own.about
        if sampler.engine is not None:
            voice.say_once(f"answers are written by {writer(c.generate.bits, sampler.engine.merged_bytes)}")
    voice.say_once(
        f"prompts: {len(prompts):,}, {c.grpo.prompts_per_step} a step with {c.grpo.group} answers each, {plural(steps, 'step')}"
    )
    engine, others = sampler.engine, {REFERENCE: copy, SCORER: judge}
    more: dict[str, Callable[[], int]] = {}
    if engine is not None:
        more = {COPY: lambda: engine.copied_bytes, CACHE: lambda: engine.cache_bytes}
    more |= {term: functools.partial(bytes_of, one) for term, one in others.items() if one is not None}
    memory = memory_of(c, own, Holding(group, model, optimizer, micro, more), judge, rollout, folder, voice)
    memory.begin()
    for mark in ("CAN-HALVE-MICRO-BATCH",) * (micro > 1) + ("POST-MODEL",):
        stoker.mark(mark)
    stoker.phase("train")
    task = GrpoTask(
        c.grpo, group, voice, position, history, about, steps, loss_scale=scale, planned_bytes=memory.planned_bytes
    )
    rollouts_mb = c.grpo.rollouts_mb if group.first else 0
    keep_rollouts = RolloutLog(folder, position.step, rollouts_mb, voice.say)
    updates_at: dict[int, int] = {}

    def updates_of(answer: Answer) -> int:
        """Behind the weights that wrote its first token."""
        return updates_at.get(answer.versions[0], updater.done) if answer.versions else updater.done

    profile = Profile(c.train.profile_steps if c.train.profile and group.first else 0, folder, group.device, voice.say)
    loop = Loop(task, keeper, group, voice, profile, first=position.step, steps=steps)
    code, stopped = 0, None
    try:
        with memory.watched():
            for step in loop.over(range(position.step, steps)):
                updates_at[step] = updater.done
                begun = time.monotonic()
                try:
                    sampler.refresh(step)
                    made = ask(step, c.train.seed)
                except StopRequested:  # on all ranks
                    loop.abandon_step()
                    continue
                answered = time.monotonic()
                if checks is not None and (step - position.step) % CHECK_EVERY == 0:
                    checks(model, group, voice)
                above = advantages(
                    torch.tensor(made.judged.rewards, dtype=torch.float64).view(-1, c.grpo.group),
                    c.grpo.scale_by_deviation,
                )
                keep_rollouts(step, updates_of, made.answers, made.judged, rewards.labels)
                share = rate_share(c.optim, step, steps)
                lengths = [int(length) for length in made.outcome.lengths.tolist()]
                learned = updater.learn(made.answers, above.flatten().tolist(), lengths, share)
                rate = c.optim.learning_rate * share
                loop.launched(
                    Launched(
                        step, made.outcome, learned, updater.done, rate, loop.words(), made.replaced, made.age, made.numbers,
                        answers_s=answered - begun, learn_s=time.monotonic() - answered,
                    )
                )  # fmt: skip
        memory.end(None)
        code = loop.code
    except (Stopped, OtherWeights) as broken:
        loop.save_before_stop()
        code, stopped = EX_SOFTWARE, f"{broken}; {keeper.last_good()}"
        # On every rank: whichever is judged, its last words name the cause.
        voice.say(f"GRPO stopped itself: {stopped}")
    except (RewardFailed, ServerFailed) as problem:
        loop.save_before_stop()
        code, stopped = EX_SOFTWARE, f"{problem} (step {loop.done}); {keeper.last_good()}"
        voice.say(f"GRPO stopped: {stopped}")
    finally:
        sampler.close()
        if isinstance(rollout, RolloutHook):
            rollout.close()
        if publish is not None:
            publish.end()
        if worker is not None:
            worker.close()

    # The model, and the result last.
    whole = loop.whole and code == 0
    if publish is not None and kept is not None and whole:
        publish.close()
        kept.close()
    exported = whole and c.checkpoint.export
    if exported:
        copied = _tokenizer_folder(words, tokenizer, folder) if group.first else words
        beside = stage.beside(c, copied, tokenizer.digest, folder, True)
        where = os.path.join(folder, "hf")
        if own is None:
            Learner().save(model, where, beside, voice.say_once, group.first)
        else:
            adapters.save(model, own.settings, own.base, where, beside, voice.say_once, group.first)
    if group.first and (stopped or whole):
        metrics = result(task.history, task.position, stopped, task.solved)
        stage.finish(c, "grpo", metrics, model="hf" if exported else None)
    voice.close()
    group.close()
    return code


def _tokenizer_folder(path: str, tokenizer: Tokenizer, folder: str) -> str:
    """To be copied into the model's; `bytes` and hub ids have none of their own."""
    if os.path.isdir(path):
        return path
    tokenizer.save(os.path.join(folder, "tokenizer"))
    return os.path.join(folder, "tokenizer")


if __name__ == "__main__":
    sys.exit(stage.run(main))
