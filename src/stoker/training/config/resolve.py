"""Preset, file, environment and flags become one configuration; and back: the shortest flags that make it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from stoker.contract import layout, terminal
from stoker.contract.errors import Refusal
from stoker.contract.frozen import frozen, options_of, replace
from stoker.contract.options import suggest
from stoker.control.record import run_index
from stoker.training.config import aliases
from stoker.training.config.check import check
from stoker.training.config.flags import parse
from stoker.training.config.keys import DEFAULTS, KEYS, config_of, values_of
from stoker.training.config.layers import Layers, Origin, gather
from stoker.training.config.presets import PRESETS
from stoker.training.config.schema import Config
from stoker.training.model import hf_config
from stoker.training.model.config import ModelConfig

# Settings whose values are models: folders, runs or hub ids.
MODEL_KEYS = (
    "model.load",
    "tokenizer.path",
    "adapter.continue_from",
    "grpo.reward_model",
    "diversity.baseline",
    "diversity.compared",
)
SHAPE = ("depth", "layers", "dim", "heads", "kv_heads", "head_dim", "ff")
# The left key counts only where the right one is 0: who gives the left and not the right means the left.
DISPLACES = {
    "train.epochs": "train.max_steps",
    "optim.warmup_ratio": "optim.warmup_steps",
    "batch.accumulation": "batch.tokens",
}
# Keys whose value follows from others, those that follow first.
COUPLED = (
    "batch.tokens",
    *(f"model.{name}" for name in ("ff", "head_dim", "kv_heads", "heads", "dim", "layers", "depth")),
    *DISPLACES.values(),
)


@frozen
class Resolved:
    config: Config
    given: Mapping[str, Origin]  # dotted keys that no preset decided
    lines: tuple[str, ...]  # to be said; the first is the preset's
    run_options: Mapping[str, Any]  # what the config file says of `stoker run`


def settle(layers: Layers, gpus_present: bool, defaults: Mapping[str, Any] | None = None) -> Resolved:
    """`defaults`: a stage's, over the preset's and below all that was said."""
    device = layers.told("parallel.device")
    cpu = not gpus_present or (device is not None and device[0] == "cpu")
    preset, line = _preset(layers, cpu)
    values = combine(preset, [*([defaults] if defaults else []), *(layer.values for layer in layers.all)])
    given = {name: origin for layer in layers.all for name, origin in layer.origins.items() if name in KEYS}
    lines = [line]
    if "batch.tokens" not in given and values["batch.tokens"] not in (0, PRESETS[preset].get("batch.tokens")):
        lines.append(
            f"batch.tokens {values['batch.tokens']}: the preset's, as a multiple of data.context_length"
            f" {values['data.context_length']}"
        )
    for left, right in DISPLACES.items():
        if left in given and right in given and values[right]:
            lines.append(
                f"{left} {KEYS[left].text(values[left])} has no effect: {right} {KEYS[right].text(values[right])}"
                " counts"
            )
    run = dict(layers.run)
    gpu = layers.told(aliases.GPU)
    if gpu is not None and values["parallel.device"] != "cpu":
        run.setdefault("gpu", gpu[0])
    return Resolved(config_of(preset, values), given, tuple(lines), run)


def _preset(layers: Layers, cpu: bool) -> tuple[str, str]:
    """(its name, the line that says so)."""
    told = layers.told(aliases.PRESET)
    if told is None:
        name, why = ("small", "the default without a GPU") if cpu else ("production", "the default with GPUs")
        others = ", ".join(other for other in PRESETS if other != name)
        return name, f"preset {name}: {why}; others: --preset {others}"
    name, origin = told
    if name not in PRESETS:
        raise Refusal(
            f"{origin.words}: no preset {name!r}{suggest(name, PRESETS) or '; there are ' + ', '.join(PRESETS)}",
            origin.code,
        )
    return name, f"preset {name} ({origin.words})"


def combine(preset: str, layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Every key's value. Pure."""
    values = {**DEFAULTS, **PRESETS[preset]}
    given: set[str] = set()
    for layer in layers:
        for left, right in DISPLACES.items():
            if left in layer and right not in layer:
                values[right] = 0
                given.discard(right)
        own = {name: value for name, value in layer.items() if name in KEYS}
        values |= own
        given |= own.keys()
    tokens, context = values["batch.tokens"], values["data.context_length"]
    if "batch.tokens" not in given and tokens and context > 0:
        values["batch.tokens"] = max(tokens // context, 1) * context
    names = options_of(ModelConfig)
    model = model_shape(ModelConfig(**{name: values[f"model.{name}"] for name in names}), given)
    return values | {f"model.{name}": getattr(model, name) for name in names}


def model_shape(model: ModelConfig, given: Collection[str]) -> ModelConfig:
    """The depth dial: a shape from one number and what was `given`, which wins. head_dim 0: no width fits."""
    may_be_zero = ("kv_heads", "head_dim", "ff")
    own = {name for name in SHAPE if f"model.{name}" in given and (getattr(model, name) or name not in may_be_zero)}
    dial = model.depth > 0
    layers = model.layers if "layers" in own or not dial else model.depth
    dim = model.dim if "dim" in own or not dial else _round_up(64 * model.depth, 128)
    heads = model.heads if "heads" in own or (not dial and "dim" not in own) else 0
    head_dim = model.head_dim if "head_dim" in own else _head_dim(dim, heads)
    if not heads and "heads" not in own:
        heads = max(dim // head_dim, 1) if head_dim > 0 else 1
    if "kv_heads" in own:
        kv_heads = model.kv_heads
    else:  # a zero that was asked for means no sharing, as without the dial
        shared = dial and "model.kv_heads" not in given and heads >= 16 and heads % 4 == 0
        kv_heads = heads // 4 if shared else heads
    ff = model.ff if "ff" in own else _round_up(-(-8 * dim // 3), 64)
    return replace(model, layers=layers, dim=dim, heads=heads, kv_heads=kv_heads, head_dim=head_dim, ff=ff)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _head_dim(dim: int, heads: int) -> int:
    if heads:
        return dim // heads if dim % heads == 0 else 0
    # 128 is what the attention kernels like best; below a width of 1024 it leaves too few heads
    widest = 128 if dim >= 1024 else 64
    return next((width for width in range(widest, 1, -2) if dim % width == 0), 0)


def flags(config: Config, keep: Iterable[str] = ()) -> list[str]:
    """For the ranks: no file, no environment; equal configurations give equal words. `keep`: always among them."""
    wanted = values_of(config)
    base = combine(config.preset, [])
    told = {name: wanted[name] for name in KEYS if name in COUPLED or wanted[name] != base[name]}
    for name in dict.fromkeys((*COUPLED, *told)):
        fewer = {other: value for other, value in told.items() if other != name}
        if combine(config.preset, [fewer]) == wanted:
            told = fewer
    told |= {name: wanted[name] for name in keep}
    assert combine(config.preset, [told]) == wanted, "flags that do not lead back"
    words = ["--preset", config.preset]
    for name, value in told.items():
        for item in value if isinstance(value, tuple) else (value,):
            text = KEYS[name].text(item)
            words += [f"--{name}={text}"] if not text or text.startswith("-") else [f"--{name}", text]
    return words


def on_cpu(config: Config, gpus_present: bool) -> bool:
    return config.parallel.device == "cpu" or (config.parallel.device == "auto" and not gpus_present)


def recipe_settings(
    argv: Sequence[str],
    gpus_present: bool,
    environment: Mapping[str, str] | None = None,
    say: Callable[[str], None] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Resolved:
    """For a recipe, under torchrun as under `stoker train`. Says which preset was chosen if none was named."""
    told = parse(argv)
    layers = gather(told, os.environ if environment is None else environment)
    found = settle(layers, gpus_present, defaults)
    check(found.config, found.given, on_cpu(found.config, gpus_present))
    if say is not None and not any(flag.name == aliases.PRESET for flag in told):
        for line in found.lines:
            say(line)
    return found


# A run started again with another of these goes on: they change what is said and kept, or how the work is cut, not what
# is learned.
PASSING = ("train.log_every", "train.log_to", "train.profile", "train.profile_steps", "train.eval_every", "train.eval_first", "train.eval_tokens", "train.samples",
           "checkpoint.every_steps", "checkpoint.every", "checkpoint.keep", "checkpoint.keep_best", "checkpoint.resume", "data.num_workers", "data.cache",
           "parallel.timeout", "parallel.strategy", "parallel.balance", "parallel.accumulate", "parallel.sharding", "parallel.offload", "batch.micro", "compute.compile", "compute.recompute", "compute.embedding", "compute.activations",
           "compute.cuda_graphs", "grpo.reward_timeout", "grpo.server_timeout", "grpo.server", "grpo.server_kind", "grpo.publish", "grpo.rollouts_mb",
           "needs.gpus", "needs.vram")  # fmt: skip


def lasting(c: Config) -> Config:
    values = values_of(c)
    return config_of(c.preset, {**values, **{name: DEFAULTS[name] for name in PASSING}})


def pinned(c: Config) -> Config:
    """A path through `runs/latest` as the run that is latest now: the new run will be it before its ranks look."""
    return config_of(c.preset, {name: _pinned(value) for name, value in values_of(c).items()})


def pinned_words(words: Sequence[str], models: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The same for the words of a command: --model.load runs/latest/hf, or --model.load=runs/latest/hf.

    `models`: values of settings that name a model -> the folder that was found for each.
    """
    resolved = models or {}
    pairs = []
    for position, word in enumerate(words):
        flag, sign, value = word.partition("=") if word.startswith("-") else ("", "", word)
        # A model's name may also be the value of another flag, such as --name.
        follows_model_flag = bool(sign or (position and _names_model(words[position - 1])))
        if value in resolved and follows_model_flag and (not sign or _names_model(flag)):
            value = resolved[value]
        pairs.append(f"{flag}{sign}{_pinned(value, _quiet)}")
    return tuple(pairs)


def _names_model(flag: str) -> bool:
    """Whether a flag is one of MODEL_KEYS, in any of its spellings."""
    name = flag.lstrip("-").replace("-", "_")
    return flag.startswith("-") and any(
        name in (key, key.partition(".")[2]) for key in (*MODEL_KEYS, "checkpoint.resume")
    )


def _quiet(line: str) -> None:
    """It was said of the settings."""


def _pinned(value: Any, say: Callable[[str], None] = terminal.print_status) -> Any:
    if isinstance(value, tuple):
        return tuple(_pinned(one, say) for one in value)
    if not isinstance(value, str) or layout.LATEST not in value.split("/"):
        return value
    return run_index.through_latest(value, say)


def with_tokenizer(c: Config, say: Callable[[str], None]) -> Config:
    """Loaded weights bring their own tokenizer."""
    return replace(c, tokenizer=replace(c.tokenizer, path=hf_config.tokenizer_of(c.model.load, say)))
