"""Settings that follow from stage, model size and amount of data, where nobody gave them (table: docs/pipeline.md).

key default < preset < derived < config file < environment < flags. A preset is written for pretraining: what a stage
derives lies over it. `debug` alone keeps its 10 steps and its batch in every stage.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from stoker.contract.frozen import frozen
from stoker.training.config.amount import Amount
from stoker.training.config.keys import config_of, values_of
from stoker.training.config.schema import Config
from stoker.training.loop.config import ANSWERED
from stoker.training.model.config import OFF, ModelConfig, parameters

RATE, CEILING = 2e-5, 1e-3  # full fine-tuning of a billion parameters; above that no stage goes at any size
BILLION, LARGER = 1e9, 0.25  # above a billion parameters the rate falls with the fourth root of the size
CAUTIOUS = {"stable": 1 / 3}  # of the rate, as that preset's own to production's
CONTINUED = 4.0  # times that: pretraining that continues from loaded weights, as midtraining does
ADAPTED = 10.0  # times that where adapters learn: what suits them at any rank (Schulman and others, 2025, LoRA Without Regret)
KEEPS_ITS_LENGTH = ("debug",)
MOST_STEPS_A_PASS = 1000  # more data: a larger batch, up to the preset's
RATES = ("optim.learning_rate", "optim.muon_learning_rate")
LENGTH = ("train.max_steps", "train.epochs")
BATCH = ("batch.tokens", "batch.accumulation")
CONTEXT, NEW_TOKENS = "data.context_length", "generate.new_tokens"
EVALUATION = "train.eval_every"
EVALUATIONS = 10  # of a run that trains adapters: their checkpoints are small, and such runs short
# They may take this share of the run, by tokens: a learned one costs two that are only read, because frozen weights need no
# gradient. Held-out prompts are answered without a cache: each of ANSWERED tokens is a pass over all (loop/samples.py).
EVALUATIONS_SHARE, LEARNED_COST = 0.1, 2.0


@frozen
class Learning:
    """How a stage learns where nobody says otherwise."""

    rate: float  # times RATE, for a billion parameters; 0: the preset's own
    passes: float  # over the data
    samples: int = 0  # in a step, while a pass has at most MOST_STEPS_A_PASS; 0: as many as the preset has
    steps_a_pass: int = 1  # at least, where there are enough samples: the batch shrinks with the data
    most_steps: bool = False  # the preset's max_steps is the most, and `passes` too
    power: float = 0.5  # below a billion parameters the rate grows with this power of 1 / size
    prompts: bool = False  # GRPO: a step has grpo.prompts_per_step, and writes new answers in every pass


# Wanted; at most; and the passes that few prompts are asked for it.
GRPO_STEPS, GRPO_MOST_STEPS, GRPO_PASSES = 100, 1000, 10


@frozen
class Situation:
    """What the rules look at beside the settings."""

    model: ModelConfig  # with its vocab_size
    amount: Amount | None  # None: the data is not here yet
    ranks: int | None  # None: only the launch will show


def derive(learning: Learning, config: Config, given: Collection[str], at: Situation) -> dict[str, Any]:
    """The keys that nobody gave, with their values. Pure."""
    found = {name: value for name, value in _rates(learning, config, at.model).items() if name not in given}
    if at.amount is None:
        return found
    free_length = not set(LENGTH) & set(given) and config.preset not in KEEPS_ITS_LENGTH
    if learning.prompts:
        return found | ({"train.max_steps": _grpo_steps(config, at.amount.samples)} if free_length else {})
    samples = samples_a_step(config, at.ranks)
    if not set(BATCH) & set(given) and config.preset not in KEEPS_ITS_LENGTH and config.batch.tokens:
        samples = _samples(learning, config, at)
        found["batch.tokens"] = samples * config.data.context_length
    if free_length and not (
        learning.most_steps and config.train.max_steps * samples <= learning.passes * at.amount.samples
    ):
        found |= {"train.max_steps": 0, "train.epochs": float(learning.passes)}
    if EVALUATION not in given and config.adapter.method != OFF and config.preset not in KEEPS_ITS_LENGTH:
        found[EVALUATION] = _eval_every(learning, config_of(config.preset, values_of(config) | found), at)
    return found


def _eval_every(learning: Learning, config: Config, at: Situation) -> int:
    """0: at the end only."""
    assert at.amount is not None
    steps, _ = steps_and_passes(learning, config, at)
    every = max(min(-(-steps // EVALUATIONS), config.train.eval_every or steps), 1)
    if config.train.patience:  # whoever gave it wants to hear often
        return every
    context, held_out = config.data.context_length, at.amount.held_out or 0
    read = min(held_out, config.train.eval_tokens or held_out)
    typical = at.amount.samples * context // max(at.amount.count, 1)
    answers = config.train.samples * ANSWERED * min(typical + ANSWERED, context)
    learned = LEARNED_COST * steps * samples_a_step(config, at.ranks) * context
    affordable = int(EVALUATIONS_SHARE * learned / max(read + answers, 1))
    if affordable >= -(-steps // every):
        return every
    return -(-steps // affordable) if affordable > 1 else 0


def settled(learning: Learning, config: Config, given: Collection[str], at: Situation) -> tuple[Config, dict[str, Any]]:
    """The configuration with what was derived, and that alone."""
    found = derive(learning, config, given, at)
    return config_of(config.preset, values_of(config) | found), found


def derivable(learning: Learning | None) -> tuple[str, ...]:
    """What a launcher says to its ranks in any case: they must not derive it again."""
    if learning is None:
        return ()
    if learning.prompts:
        return (*RATES, *LENGTH, CONTEXT, NEW_TOKENS)
    return (*RATES, *LENGTH, *BATCH, EVALUATION, CONTEXT)


def within(learning: Learning, config: Config, given: Collection[str], longest: int) -> dict[str, Any]:
    """The keys that nobody gave, so that rows are no longer than what a loaded model was trained for. Pure. `longest`: 0 where
    its folder does not say."""
    if CONTEXT in given or not 1 < longest < config.data.context_length:
        return {}
    found: dict[str, Any] = {CONTEXT: longest}
    if "batch.tokens" not in given and config.batch.tokens:
        found["batch.tokens"] = max(config.batch.tokens // longest, 1) * longest
    if learning.prompts and NEW_TOKENS not in given:
        found[NEW_TOKENS] = min(config.generate.new_tokens, longest // 2)  # a prompt and its answer share the row
    return found


def rate_at(size: int, power: float) -> float:
    smaller = BILLION / max(size, 1)
    return RATE * math.pow(smaller, power if smaller > 1 else LARGER)


def samples_a_step(config: Config, ranks: int | None) -> int:
    batch = config.batch
    return batch.tokens // config.data.context_length or max(batch.micro, 1) * batch.accumulation * (ranks or 1)


def steps_and_passes(learning: Learning, config: Config, at: Situation) -> tuple[int, float]:
    """Of the whole run. The passes of data that is not here yet are nan."""
    samples = config.grpo.prompts_per_step if learning.prompts else samples_a_step(config, at.ranks)
    if at.amount is None:
        return config.train.max_steps, math.nan
    steps = config.train.max_steps or max(-(-round(config.train.epochs * at.amount.samples) // samples), 1)
    return steps, steps * samples / at.amount.samples if config.train.max_steps else config.train.epochs


def _rates(learning: Learning, config: Config, model: ModelConfig) -> dict[str, float]:
    share = learning.rate or (CONTINUED if config.model.load else 0.0)
    if not share:
        return {}
    if config.adapter.method != OFF:
        share *= ADAPTED
    rate = min(share * rate_at(parameters(model), learning.power), CEILING) * CAUTIOUS.get(config.preset, 1.0)
    found = {"optim.learning_rate": _two_digits(rate)}
    if config.optim.kind == "muon":  # an orthogonal matrix has entries of about 1/√width: the same change per weight
        found["optim.muon_learning_rate"] = _two_digits(rate * math.sqrt(model.dim))
    return found


def _samples(learning: Learning, config: Config, at: Situation) -> int:
    assert at.amount is not None
    # Not a function of the ranks: the same data gives the same steps, and the same loss curve, on any number of them.
    preset = max(config.batch.tokens // config.data.context_length, 1)
    most = min(max(learning.samples or preset, _power_of_two(at.amount.samples // MOST_STEPS_A_PASS)), preset)
    wanted = at.amount.samples // learning.steps_a_pass
    return most if wanted >= most else max(_power_of_two(wanted), 1)


def _power_of_two(number: int) -> int:
    """The largest that is not above it; 0 of 0."""
    return 1 << number.bit_length() - 1 if number > 0 else 0


def _grpo_steps(config: Config, prompts: int) -> int:
    a_pass = prompts / config.grpo.prompts_per_step
    more = min(GRPO_STEPS, math.floor(GRPO_PASSES * a_pass))
    return max(min(math.ceil(a_pass), GRPO_MOST_STEPS), more, 1)


def _two_digits(value: float) -> float:
    return float(f"{value:.1e}")


def about(dotted: str, stages: Mapping[str, Learning]) -> str:
    """What the generated docs say of a key that stages derive."""
    packed = {name: learning for name, learning in stages.items() if not learning.prompts}
    if dotted == "optim.learning_rate":
        rates = ", ".join(f"{name} {learning.rate * RATE:g}" for name, learning in stages.items() if learning.rate)
        return (
            f"{rates} for 1 billion parameters; smaller models more, larger ones less (`stoker docs pipeline`), at most"
            f" {CEILING:g}"
        )
    if dotted == "optim.muon_learning_rate":
        return "the AdamW rate × √dim in all but pretrain"
    if dotted == "train.epochs":
        return ", ".join(
            f"{name} {learning.passes:g}{' at most' if learning.most_steps else ''}"
            for name, learning in packed.items()
        )
    if dotted == "train.max_steps":
        grpo = (
            f"grpo one pass over the prompts, up to {GRPO_PASSES} to make {GRPO_STEPS} steps, {GRPO_MOST_STEPS:,} steps"
            " at most"
        )
        return f"{grpo}; others 0, so that epochs counts (pretrain: where the data is small)"
    if dotted == EVALUATION:
        return (
            f"a run that trains adapters has {EVALUATIONS} validations, fewer if they would take more than"
            f" {100 * EVALUATIONS_SHARE:.0f} % of it"
        )
    if dotted == "batch.tokens":
        most = ", ".join(f"{name} {learning.samples}" for name, learning in packed.items() if learning.samples)
        least = ", ".join(f"{name} {learning.steps_a_pass}" for name, learning in packed.items())
        return (
            f"{most} samples, more where a pass has over {MOST_STEPS_A_PASS:,} steps, fewer where it has under:"
            f" {least}; never above the preset's"
        )
    return ""


def rule(dotted: str, learning: Learning, config: Config) -> str:
    """Return how a stage derives this key where nobody sets it, in words; empty where it does not. `config`: its defaults."""
    keeps = config.preset in KEEPS_ITS_LENGTH
    if dotted == "optim.learning_rate" and learning.rate:
        rate = learning.rate * RATE * CAUTIOUS.get(config.preset, 1.0)
        return f"{_two_digits(rate):g} for 1 billion parameters, more for fewer, {ADAPTED:g} times that for adapters"
    if dotted == "train.max_steps" and learning.prompts and not keeps:
        return f"one pass over the prompts, up to {GRPO_PASSES} to make {GRPO_STEPS} steps, at most {GRPO_MOST_STEPS:,}"
    if learning.prompts or keeps:
        return ""
    if dotted == "train.max_steps":
        if learning.most_steps:
            return f"{config.train.max_steps:,}, or 0 where these are over {learning.passes:g} epochs"
        return "0, so that epochs counts"
    if dotted == "train.epochs":
        return f"{learning.passes:g}{', at most' if learning.most_steps else ''}"
    if dotted == "batch.tokens" and config.batch.tokens:
        most = config.batch.tokens // config.data.context_length
        samples = min(learning.samples or most, most)
        return f"{samples} rows, fewer where a pass has under {learning.steps_a_pass} steps" + (
            f", up to {most} where it has over {MOST_STEPS_A_PASS:,}" if samples < most else ""
        )
    return ""


def rule_with_adapters(dotted: str, learning: Learning, config: Config) -> str:
    """Return how this key is derived in a run that trains adapters, in words; empty where that changes nothing."""
    if dotted == EVALUATION and not learning.prompts and config.preset not in KEEPS_ITS_LENGTH:
        return f"{EVALUATIONS} validations a run, fewer where they take over {100 * EVALUATIONS_SHARE:.0f} % of it"
    return ""


def rule_with_model(dotted: str, learning: Learning, config: Config) -> str:
    """Return how this key is derived of a loaded model, in words; empty where it is not."""
    if dotted == "optim.learning_rate" and not learning.rate:
        rate = CONTINUED * RATE * CAUTIOUS.get(config.preset, 1.0)
        return f"{_two_digits(rate):g} for 1 billion parameters, more for fewer, {ADAPTED:g} times that for adapters"
    if dotted == CONTEXT:
        return f"{config.data.context_length}, or fewer if the model was trained for fewer"
    if dotted == NEW_TOKENS and learning.prompts:
        return f"{config.generate.new_tokens}, or half of the model's context"
    return ""
