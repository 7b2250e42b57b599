"""What derived defaults look at, from the model's folder and the data's files; and the block that prints them."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from stoker.contract.frozen import frozen, replace
from stoker.contract.units import plural
from stoker.training.config import amount
from stoker.training.config.amount import Amount
from stoker.training.config.check import check
from stoker.training.config.derived import (
    BATCH,
    CONTEXT,
    LENGTH,
    Learning,
    Situation,
    samples_a_step,
    settled,
    steps_and_passes,
    within,
)
from stoker.training.config.keys import config_of, values_of
from stoker.training.config.layers import Origin
from stoker.training.config.schema import Config
from stoker.training.data.shards import Prepared
from stoker.training.model import hf_config, hf_hub
from stoker.training.model.config import ModelConfig, parameters, with_rows
from stoker.training.optim.config import warmup_length
from stoker.training.stages.registry import STAGES

# The block a training stage prints before it starts: what was chosen, by whom, which flag changes it. Pure.


MANY_PASSES = 10


@frozen
class Choice:
    what: str
    chosen: str
    flags: str
    keys: tuple[str, ...]


def _choices(
    learning: Learning, config: Config, given: Collection[str], at: Situation, on_cpu: bool
) -> Iterator[Choice]:
    steps, passes = steps_and_passes(learning, config, at)
    if at.amount is None and not set(LENGTH) & set(given):
        steps = 0  # the preset's, which the data will change
    optim, context = config.optim, config.data.context_length
    rate = f"{optim.learning_rate:.2g}" + (f" (Muon {optim.muon_learning_rate:.2g})" if optim.kind == "muon" else "")
    yield Choice("learning rate", f"{rate}, {optim.schedule}", "--learning-rate, --schedule", ("optim.learning_rate",))
    warm = plural(warmup_length(optim, steps), "step") if steps else f"{optim.warmup_ratio:.0%} of the run"
    yield Choice("warm-up", warm, "--warmup", ("optim.warmup_steps", "optim.warmup_ratio"))
    if learning.prompts:
        asked = f"{config.grpo.prompts_per_step} prompts a step, {config.grpo.group} answers each"
        yield Choice("batch", asked, "--grpo.prompts_per_step, --grpo.group", ("grpo.prompts_per_step", "grpo.group"))
    else:
        samples = samples_a_step(config, at.ranks)
        whole = config.batch.tokens or config.batch.micro
        words = "as many tokens a step as fit"
        if whole:
            words = f"{samples * context:,} tokens a step, {plural(samples, 'row')}"
        if at.amount is None and not set(BATCH) & set(given):
            words += " at most"
        yield Choice("batch", words, "--batch.tokens", ("batch.tokens", "batch.accumulation", "batch.micro"))
    yield Choice(
        "length",
        _length(steps, passes, at, bool(config.train.max_steps)),
        "--epochs or --max-steps",
        ("train.max_steps", "train.epochs"),
    )
    if not learning.prompts and at.amount is not None:
        if at.amount.held_out == 0:
            yield Choice("validation", "none: no data is held out", "--data.validation", ("data.validation",))
        else:
            when = _validation(config.train.eval_every, steps)
            yield Choice("validation", when, "--eval-every", ("train.eval_every",))
    yield Choice("row length", f"{plural(context, 'token')}", "--context-length", (CONTEXT,))
    dtype = {"auto": "fp32" if on_cpu else "bf16, or fp16 with loss scaling on a card without it"}.get(
        config.compute.dtype, config.compute.dtype
    )
    yield Choice("precision", dtype, "--dtype", ("compute.dtype",))


def _length(steps: int, passes: float, at: Situation, fixed: bool) -> str:
    """`fixed`: the steps are a setting, and do not follow from the data."""
    if at.amount is None:
        return f"{plural(steps, 'step')}" if steps else "known once the data is here"
    shown = f"{passes:,.0f}" if passes >= 10 else f"{passes:.2g}"
    many = f"{steps:,}" if at.amount.exact or fixed else f"about {_rounded(steps):,}"
    return f"{many} steps, {shown} pass{'' if shown == '1' else 'es'} over {_count(at.amount)}"


def _count(amount: Amount) -> str:
    """What people count; of tokens that were estimated, about."""
    if not amount.exact and amount.unit == "tokens":
        return f"about {_rounded(amount.count):,} tokens"
    return f"your {amount.count:,} {amount.unit}"


def _validation(every: int, steps: int) -> str:
    if not every or every >= steps:
        return "at the end only"
    return f"every {plural(every, 'step')}, {plural(-(-steps // every), 'time')}"


def _amount(at: Situation) -> str:
    if at.amount is None:
        return "data that is not on this machine yet"
    about, shown = ("", int) if at.amount.exact else ("about ", _rounded)
    count = shown(at.amount.count) if at.amount.unit == "tokens" else at.amount.count
    tokens = f", {about}{shown(at.amount.tokens):,} tokens" if at.amount.tokens and at.amount.unit != "tokens" else ""
    rows = f" in {about}{shown(at.amount.samples):,} rows" if at.amount.samples != at.amount.count else ""
    how = f" ({at.amount.how})" if at.amount.how else ""
    return f"{about}{count:,} {at.amount.unit}{tokens}{rows}{how}"


def _rounded(count: int) -> int:
    """To two digits: an estimate has no more."""
    return int(float(f"{count:.1e}"))


def _fewer(learning: Learning, given: Collection[str]) -> str:
    if learning.prompts:
        return "give more prompts, or --max-steps"
    set_by_user = {"train.max_steps", "train.epochs"} & set(given)
    return f"--epochs {learning.passes:g} is the default" if set_by_user else "give more data, or --epochs"


def _millions(count: int) -> str:
    if count >= 1e9:
        return f"{count / 1e9:.2f} billion"
    return f"{count / 1e6:.2f} million" if count >= 10_000 else str(count)


BYTES_VOCABULARY = 272
UNKNOWN_VOCABULARY = 32_768  # of a tokenizer that is not read before the start


def situation(stage: str, config: Config, ranks: int | None, ready: Prepared | None = None) -> Situation:
    """Return the model, the amount of data and the number of ranks that the derived defaults depend on.

    Without `ready` the rows of `data.path` are estimated. Raises Refusal for pairs that training would refuse.
    """
    model = _model(config, ready)
    if ready is not None:
        return Situation(model, amount.of_prepared(ready, config), ranks)
    if STAGES[stage].prepares:
        return Situation(model, amount.estimated(config, model.vocab_size), ranks)
    learning = STAGES[stage].learning
    prompts = learning is not None and learning.prompts
    source = config.grpo.prompts if prompts else (config.dpo if stage == "dpo" else config.reward).pairs
    if not os.path.exists(source):  # a hub id that is not fetched yet
        return Situation(model, None, ranks)
    if prompts:
        return Situation(model, amount.of_prompts(config), ranks)
    tokenizer = config.tokenizer.path or hf_config.tokenizer_in(_folder(config))
    return Situation(model, amount.of_pairs(config, stage, tokenizer, model.vocab_size), ranks)


def with_context_of_model(
    stage: str, config: Config, given: Mapping[str, Origin], on_cpu: bool, say: Callable[[str], None]
) -> Config:
    """Return the configuration with rows that a loaded model was trained for, and check what that changes."""
    if STAGES[stage].learning is None or not config.model.load:
        return config
    limited = within_context_of_model(stage, config, given, _model(config, None).longest, say)
    if limited is not config:
        check(limited, given, on_cpu)
        STAGES[stage].check(limited)
    return limited


def within_context_of_model(
    stage: str, config: Config, given: Mapping[str, Origin], longest: int, say: Callable[[str], None]
) -> Config:
    """Limit the rows to the `longest` that the loaded model was trained for, unless the user set their length: then a longer
    one is warned about."""
    learning = STAGES[stage].learning
    assert learning is not None, f"stage {stage} does not train"
    changed = within(learning, config, given, longest)
    if changed:
        return config_of(config.preset, values_of(config) | changed)
    if 1 < longest < config.data.context_length:
        say(
            f"warning: {CONTEXT} {config.data.context_length:,} is more than the {plural(longest, 'token')} that"
            f" {config.model.load} was trained for; beyond them it starts from what it can't do yet"
        )
    return config


def with_defaults(
    stage: str, config: Config, given: Collection[str], at: Situation, on_cpu: bool, kept: Collection[str] = ()
) -> tuple[Config, dict[str, Any], list[str]]:
    """The settings, the keys that were derived, and the block to print, whose last line may be a warning. `kept`: keys that
    have the values of the run that is continued.
    """
    learning = STAGES[stage].learning
    assert isinstance(learning, Learning), f"stage {stage} does not train"
    config, derived = settled(learning, config, {*given, *kept}, at)
    choices = list(_choices(learning, config, given, at, on_cpu))
    wide = max(len(choice.chosen) for choice in choices)
    lines = [f"{stage}: {_millions(parameters(at.model))} parameters, {_amount(at)}"]
    for choice in choices:
        source = f"{stage}'s default" if any(key in derived for key in choice.keys) else f"preset {config.preset}"
        if choice.keys == (CONTEXT,) and config.data.context_length == at.model.longest:
            source = "the most the model was trained for"
        source = "as this run began" if any(key in kept for key in choice.keys) else source
        source = "you set it" if any(key in given for key in choice.keys) else source
        lines.append(f"  {choice.what:<14} {choice.chosen:<{wide}}  {source}; {choice.flags}")
    _, passes = steps_and_passes(learning, config, at)
    if passes > MANY_PASSES and at.amount is not None:
        line = (
            f"warning: {passes:,.0f} passes over {_count(at.amount)}: above {MANY_PASSES} a model learns them by heart"
        )
        lines.append(f"{line}; {_fewer(learning, given)}")
    return config, derived, lines


def _model(config: Config, ready: Prepared | None) -> ModelConfig:
    if config.model.load:
        loaded = hf_config.shape_for(config.model, _folder(config))
        return replace(loaded, vocab_size=config.model.vocab_size or loaded.vocab_size)
    return with_rows(
        config.model, ready.vocab_size if ready is not None else config.model.vocab_size or _vocabulary(config)
    )


def _folder(config: Config) -> str:
    """Return the folder of the model that is loaded."""
    return hf_hub.folder_of(config.model.load, lambda line: None, code=config.model.trust_remote_code)


def _vocabulary(config: Config) -> int:
    if not config.tokenizer.path:
        return config.tokenizer.vocab_size
    return BYTES_VOCABULARY if config.tokenizer.path == "bytes" else UNKNOWN_VOCABULARY
