"""Direct Preference Optimisation: the model learns from pairs of answers which of them to prefer, without a reward model.

    stoker train dpo --model.load sft/hf --dpo.pairs pairs.jsonl
    stoker train dpo --model.load sft/hf --dpo.pairs ultrafeedback.jsonl.gz --dpo.held_out test.jsonl.gz --context-length 2048

data.context_length must hold both answers of a pair with their prompt. Reads top to bottom: settings, pairs, ranks, the
frozen reference, steps; dpo/model.py has the loss, supervised.py makes the steps.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from stoker.contract.names import EX_CONFIG, Refusal
from stoker.training.config.check import check_ranks
from stoker.training.config.schema import Config
from stoker.training.dpo.model import Measured, Reference, learner, means, measured
from stoker.training.evaluate.confidence import wilson
from stoker.training.loop.material import Material
from stoker.training.loop.say import Voice
from stoker.training.loop.speed import Startup
from stoker.training.model import hf, ready
from stoker.training.model.attention import kernels
from stoker.training.parallel.group import Group, shard
from stoker.training.recipes import build, stage, supervised
from stoker.training.reward.config import DpoConfig
from stoker.training.reward.pairs import Pair, PairRows, pairs_of
from stoker.training.tokenizer import chat


def main(argv: list[str]) -> int:
    startup = Startup()
    startup.done("imports")
    c = stage.settings(argv, "dpo")
    check_ranks(c, int(os.environ.get("WORLD_SIZE", "1")))

    # Pairs: read by every rank, before there is a process group.
    tokenizer = stage.tokenizer_of(c)
    context, pad = c.data.context_length, chat.pad_id(tokenizer)
    pairs, held_out = pairs_of(c.dpo.pairs, c.dpo.held_out, tokenizer, context, "dpo", stage.from_rank_0)
    train, other = (PairRows(some, context, pad, answers=True) for some in (pairs, held_out))
    startup.done("data")

    group = Group(c.parallel)
    startup.done("ranks")
    folder = c.tokenizer.path or stage.weights_of(c.model.load)
    material = Material(train.digest(), tokenizer.vocab_size, folder, tokenizer.digest, train, other)
    voice = Voice(group, c.train.log_every)
    with kernels(ready.attention(c.compute, group.device)):
        reference = reference_of(c, tokenizer.vocab_size, group, voice)
        trained = supervised.train(c, material, learner(reference, c.dpo), group, voice, startup)
        if trained.whole:
            found = measured(trained.parts.wrapped, other, group, trained.parts.micro)
            if group.first:
                told = result(held_out, found, c.dpo)
                voice.say(
                    f"held-out pairs with the higher implicit reward on the better answer: {told['accuracy']:.1%}"
                    f" ({told['low']:.1%} – {told['high']:.1%}) of {told['total']}"
                )
                stage.finish(c, "dpo", {**trained.metrics, **told}, model="hf" if c.checkpoint.export else None)
    voice.close()
    group.close()
    return trained.code


def reference_of(c: Config, vocab_size: int, group: Group, voice: Voice) -> Reference:
    """The weights of `model.load` in the activations' dtype, sharded as the model is. A resumed run reads them again."""
    weights, shape = build.model_shape(c.model, vocab_size, voice)
    if shape.engine == "transformers":
        raise Refusal("model.engine transformers can't do the stage dpo: load a model of a family", EX_CONFIG)
    dtype = ready.dtype_of(c.compute, group.device)
    ready.arithmetic(c.compute, dtype)
    with torch.device("meta"):
        model = Reference(shape, c.data.context_length, dtype).to(dtype)
    model.normalised = c.dpo.length_normalised
    ready.make_ready(model, c.compute, group.device, lambda line: None)
    if group.strategy == "fsdp":
        shard(model, group, dtype)
    model.place(group.device)
    hf.load(model, weights, lambda line: None)
    model.requires_grad_(False)
    voice.say_once(f"reference: {weights}, frozen, {str(dtype)[6:]}")
    return model.eval()


def result(pairs: list[Pair], found: Measured, rule: DpoConfig) -> dict[str, Any]:
    right = (found.ratio > 0).tolist()
    by_kind: dict[str, list[bool]] = {}
    for pair, first in zip(pairs, right, strict=True):
        by_kind.setdefault(pair.kind, []).append(first)
    return {
        **_share(right),
        "by_kind": {kind: _share(some) for kind, some in sorted(by_kind.items())},
        **means(found, rule),
    }


def _share(right: list[bool]) -> dict[str, Any]:
    sure = wilson(sum(right), len(right))
    return {"accuracy": sum(right) / len(right), "low": sure.low, "high": sure.high, "total": len(right)}


if __name__ == "__main__":
    sys.exit(stage.run(main))
