"""GRPO: the model answers each prompt several times and learns from which of its answers were right.

    stoker train grpo --model.load sft/hf --grpo.prompts prompts.jsonl --max-steps 60
    stoker train grpo --model.load sft/hf --grpo.prompts prompts.jsonl --grpo.weights density/weights.jsonl --grpo.reward_model reward/hf

Reads top to bottom: settings, prompts, ranks, model, reference, steps. rl/ has a file for each idea: steps.py makes the steps, loss.py has the formula.
"""

from __future__ import annotations

import functools
import os
import sys

import stoker
from stoker.contract import redact
from stoker.contract.names import EX_SOFTWARE
from stoker.contract.shape import as_json
from stoker.contract.wholefile import write_whole
from stoker.training.config.yamlform import as_yaml
from stoker.training.loop import state
from stoker.training.loop.say import Voice, where_runs_go
from stoker.training.model import hf, ready
from stoker.training.model.rows import with_rows
from stoker.training.optim.optimizer import Optimizer
from stoker.training.parallel.group import Group
from stoker.training.recipes import stage
from stoker.training.rl import prompts as asking
from stoker.training.rl.breaker import Stopped
from stoker.training.rl.keeping import Keeper, go_on
from stoker.training.rl.limits import check, micro_batch, steps_of
from stoker.training.rl.reward import reward, scorer_of
from stoker.training.rl.rollout import rollout_of
from stoker.training.rl.steps import Steps, result
from stoker.training.rl.update import Updater
from stoker.training.tokenizer.tokenizer import Tokenizer


def main(argv: list[str]) -> int:
    # Settings, refused here where they can't work.
    c = stage.settings(argv, "grpo")
    check(c)
    folder, micro = where_runs_go(c), micro_batch(c)
    weights, tokenizer = stage.weights_of(c.model.load), stage.tokenizer_of(c)

    # Prompts as token ids, and how often each is sampled.
    rows = stage.rows_of(c.grpo.prompts, "grpo.prompts")
    prompts, left_out = asking.read(
        rows, tokenizer, c.data.context_length - c.generate.new_tokens, c.grpo.prompts, c.generate.system
    )
    prompts = prompts[: c.data.max_samples or None]
    draw = asking.draw_of(
        stage.rows_of(c.grpo.weights, "grpo.weights") if c.grpo.weights else None, prompts, len(rows), c.grpo.weights
    )
    steps = steps_of(c, len(prompts))

    # Ranks.
    group = Group(c.parallel)
    voice = Voice(group, c.train.log_every)
    for line in left_out:
        voice.say_once(line)
    if group.first:
        os.makedirs(folder, 0o700, exist_ok=True)
        write_whole(os.path.join(folder, "config.yaml"), redact.whole(as_yaml(c)).encode())

    # Model and optimizer. The reference: the weights it all begins with, in the activations' dtype. The reward model,
    # where there is one.
    model = stage.open_model(c, weights, group.device)
    with_rows(model.config, tokenizer.vocab_size)
    ready.make_ready(model, c.compute, group.device, voice.say_once)
    optimizer = Optimizer(model, c.optim)
    reference = None
    if c.grpo.kl > 0:
        reference = stage.open_model(c, weights, group.device).to(model.dtype).requires_grad_(False)
        ready.make_ready(reference, c.compute, group.device, voice.say_once)
    rewarding = functools.partial(
        reward, scorer=scorer_of(c, tokenizer, group.device, micro), weight=c.grpo.reward_weight
    )

    # Where a checkpoint left them, if there is one.
    kernels = ready.attention(c.compute, group.device)
    updater = Updater(
        model, reference, optimizer, group, c.grpo, temperature=c.generate.temperature, micro=micro, attention=kernels
    )
    updater.settle()
    tensors = state.tensors(model, optimizer)
    position, history = go_on(c, group, voice, tensors)
    updater.resume(position.updates)
    voice.begin(folder, steps, c.train.log_to, as_json(c), position.step)

    # The steps.
    rollout = rollout_of(model, tokenizer, max(len(prompt.ids) for prompt in prompts), c, group)
    words = c.tokenizer.path or weights
    about = {
        "model": as_json(model.config),
        "data": {"context": c.data.context_length},
        "tokenizer_digest": tokenizer.digest,
        "tokenizer": os.path.abspath(words) if os.path.isdir(words) else None,
    }
    keeper = Keeper(c, group, voice, tensors, about)
    updater.before_update = keeper.saver.before_update
    loop = Steps(c, group, voice, prompts, draw, rollout, rewarding, updater, keeper, position, history, steps)
    voice.say_once(
        f"prompts: {len(prompts):,}, {c.grpo.prompts_per_step} a step with {c.grpo.group} answers each, {steps} steps"
    )
    for mark in ("CAN-HALVE-MICRO-BATCH",) * (micro > 1) + ("POST-MODEL",):
        stoker.mark(mark)
    stoker.phase("train")
    stopped: str | None = None
    try:
        code = loop.run()
    except Stopped as broken:
        code, stopped = EX_SOFTWARE, str(broken)
        voice.say(
            f"GRPO stopped itself: {stopped}"
        )  # on every rank: whichever is judged, its last words name the cause

    # The model, and the result last.
    exported = code == 0 and loop.whole and c.checkpoint.export
    if exported:
        copied = _tokenizer_folder(c.tokenizer.path or weights, tokenizer, folder) if group.first else None
        hf.save(model, os.path.join(folder, "hf"), tokenizer_folder=copied, say=voice.say_once, write=group.first)
    if group.first and (stopped or (code == 0 and loop.whole)):
        stage.finish(
            c, "grpo", result(loop.history, loop.position, stopped, loop.solved), model="hf" if exported else None
        )
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
