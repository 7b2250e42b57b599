"""Other people's names for our keys: those of the field notes, and what other trainers call the same thing."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from stoker.contract.options import parse_bool, suggest
from stoker.contract.text import is_digits
from stoker.training.config.keys import BARE, KEYS, LEAVES

PRESET, GPU = "preset", "run.gpu"  # what an alias may mean besides a key: the preset, and an option of `stoker run`

RENAMED = {
    "batch_size": "batch.micro", "micro_batch": "batch.micro", "micro_batch_size": "batch.micro", "per_device_train_batch_size": "batch.micro",
    "grad_accum_nums": "batch.accumulation", "grad_accum": "batch.accumulation", "gradient_accumulation_steps": "batch.accumulation",
    "batch_tokens": "batch.tokens", "total_batch_size": "batch.tokens",
    "seq_len": "data.context_length", "max_seq_len": "data.context_length", "sequence_length": "data.context_length",
    "lr": "optim.learning_rate", "grad_clip": "optim.max_grad_norm", "scheduler": "optim.schedule", "lr_scheduler_type": "optim.schedule",
    "n_layers": "model.layers", "n_layer": "model.layers", "num_layers": "model.layers", "num_hidden_layers": "model.layers",
    "hidden_size": "model.dim", "d_model": "model.dim", "n_embd": "model.dim", "intermediate_size": "model.ff", "ffn_dim": "model.ff",
    "n_heads": "model.heads", "n_head": "model.heads", "num_heads": "model.heads", "num_attention_heads": "model.heads",
    "n_kv_heads": "model.kv_heads", "num_kv_heads": "model.kv_heads", "num_key_value_heads": "model.kv_heads", "rms_norm_eps": "model.norm_eps",
    "num_epochs": "train.epochs", "num_train_epochs": "train.epochs", "num_steps": "train.max_steps",
    "steps": "train.max_steps", "max_iters": "train.max_steps", "total_steps": "train.max_steps",
    "log_interval": "train.log_every", "logging_steps": "train.log_every", "eval_interval": "train.eval_every",
    "save_interval": "checkpoint.every_steps", "save_steps": "checkpoint.every_steps",
}  # fmt: skip
# The notes' sections, and which of ours each is first of all. In them any name that is clear without its section is
# understood.
NOTES_SECTIONS = {"system": "parallel", "training": "train", "model": "model", "optimizer": "optim", "data": "data"}
# A section that is given a plain value instead of keys: --data PATH, `tokenizer: bytes`.
SECTION_VALUES = {
    "data": "data.path",
    "tokenizer": "tokenizer.path",
    "model": "model.load",
    "optimizer": "optim.kind",
    "optim": "optim.kind",
    "adapter": "adapter.method",
    "parallel": "parallel.strategy",
}


def _warmup(value: Any) -> dict[str, Any]:
    try:
        number = float(str(value))
    except ValueError as problem:
        raise ValueError(f"{value!r} is not a number of steps, or a share of the run below 1") from problem
    return {"optim.warmup_steps": value} if number >= 1 else {"optim.warmup_steps": 0, "optim.warmup_ratio": value}


def _every(value: Any) -> dict[str, Any]:
    """500 steps: then no longer by time."""
    steps = re.fullmatch(r"\s*(\d+)\s*steps?\s*", str(value).lower())
    return {"checkpoint.every_steps": steps[1], "checkpoint.every": 0} if steps else {"checkpoint.every": value}


def _dtype(name: str) -> Callable[[Any], dict[str, Any]]:
    return lambda value: {"compute.dtype": name if parse_bool(value) else "auto"}


def _logger(name: str) -> Callable[[Any], dict[str, Any]]:
    return lambda value: {"train.log_to": name if parse_bool(value) else ""}


def _device_id(value: Any) -> dict[str, Any]:
    if isinstance(value, bool) or not is_digits(str(value)):
        raise ValueError(f"{value!r} is not the number of a GPU")
    return {GPU: str(value)}


TRANSLATED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "use_amp": lambda value: {"compute.dtype": "auto" if parse_bool(value) else "fp32"},
    "gradient_checkpointing": lambda value: {"compute.recompute": "full" if parse_bool(value) else "off"},
    **{name: _dtype(name) for name in ("bf16", "fp16", "fp32")},
    **{name: _logger(name) for name in ("tensorboard", "wandb", "trackio", "mlflow")},
    "lora": lambda value: {"adapter.method": "lora" if parse_bool(value) else "off"},
    "qlora": lambda value: {"adapter.method": "qlora" if parse_bool(value) else "off"},
    "debug": lambda value: {PRESET: "debug"} if parse_bool(value) else {},
    "warmup": _warmup,
    "device_id": _device_id,
}
SWITCHES = tuple(name for name in TRANSLATED if name not in ("warmup", "device_id"))  # a flag of these needs no value


def names() -> list[str]:
    """All that may stand without a section."""
    return [*BARE, *RENAMED, *TRANSLATED]


def meaning(name: str, value: Any) -> dict[str, Any] | None:
    """The keys (or PRESET, GPU) a name stands for, their values read; None: unknown. ValueError: a bad value."""
    if (BARE.get(name) or name) == "checkpoint.every":
        found = _every(value)
    elif name in KEYS:
        found = {name: value}
    elif name in BARE or name in RENAMED:
        found = {BARE.get(name) or RENAMED[name]: value}
    elif name in TRANSLATED:
        found = TRANSLATED[name](value)
    elif name in SECTION_VALUES:
        found = {SECTION_VALUES[name]: value}
    elif name in LEAVES:
        raise ValueError(f"it could be {' or '.join(LEAVES[name])}: write one of them")
    else:
        return None
    return {dotted: KEYS[dotted].read(one) if dotted in KEYS else one for dotted, one in found.items()}


def in_section(section: str, name: str) -> str | None:
    """`name` below `section` as a dotted key, or one of `names()`. None where it does not belong there."""
    ours = NOTES_SECTIONS.get(section, section)
    if f"{ours}.{name}" in KEYS:
        return f"{ours}.{name}"
    target = BARE.get(name) or RENAMED.get(name, "")
    if target.startswith(f"{ours}.") or (
        section in NOTES_SECTIONS and (target or name in TRANSLATED or name in LEAVES)
    ):
        return name
    return "warmup" if name == "warmup" and ours == "optim" else None


def near(section: str, name: str) -> str:
    """What was probably meant, as `suggest` has it."""
    ours = NOTES_SECTIONS.get(section, section)
    own = [key.name for key in KEYS.values() if key.section == ours]
    return suggest(name, [*own, *names()] if not section or section in NOTES_SECTIONS else own)
