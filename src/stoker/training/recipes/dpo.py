"""Direct Preference Optimisation: the model learns from pairs of answers which of them to prefer, without a reward model.

    stoker train dpo --model.load sft/hf --dpo.pairs pairs.jsonl
    stoker train dpo --model.load sft/hf --dpo.pairs ultrafeedback.jsonl.gz --dpo.held_out test.jsonl.gz --context-length 2048

data.context_length must hold both answers of a pair with their prompt. Reads top to bottom: settings, pairs, ranks, the
frozen reference, steps; dpo/model.py has the loss, supervised.py makes the steps.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from stoker.contract.names import EX_CONFIG, Refusal
from stoker.training.config.schema import Config
from stoker.training.dpo.model import Reference, learner, means, measured
from stoker.training.loop.learner import Learner
from stoker.training.loop.say import Voice
from stoker.training.loop.supervised import Parts
from stoker.training.model import hf, ready
from stoker.training.parallel.group import Group, shard
from stoker.training.recipes import build, stage
from stoker.training.recipes.supervised import PairStage, learn_pairs
from stoker.training.reward.pairs import PairRows


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


def measure(c: Config, parts: Parts, held_out: PairRows) -> tuple[list[bool], dict[str, Any]]:
    found = measured(parts.wrapped, held_out, parts.group, parts.micro)
    return (found.ratio > 0).tolist(), means(found, c.dpo)


def main(argv: list[str]) -> int:
    line = "held-out pairs with the higher implicit reward on the better answer"

    def begun(c: Config, vocab_size: int, group: Group, voice: Voice) -> Learner:
        return learner(reference_of(c, vocab_size, group, voice), c.dpo)

    return learn_pairs(argv, PairStage("dpo", line, begun, measure, answers=True))


if __name__ == "__main__":
    sys.exit(stage.run(main))
