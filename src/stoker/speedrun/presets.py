"""How large a speedrun is, by hardware: one plain table of each stage's keys. Later rows win: all < recipe < stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.contract.errors import EX_UNAVAILABLE, EX_USAGE, Refusal
from stoker.contract.frozen import frozen
from stoker.contract.options import suggest


@frozen
class Preset:
    name: str
    about: str
    below: str  # the preset of `stoker train` that all keys lie on
    level: int  # of the built-in world
    size: float
    keys: Mapping[str, Mapping[str, Any]]  # `all`, a recipe's name, or a stage's
    gpus: bool = False  # it can't be done without
    data: bool = False  # the built-in world is too small for it


# Muon on all matrices, and small steps: together far sooner at a loss than AdamW with large ones (docs/log.md). The
# longest right answer has 77 tokens.
_MUON = {
    "optim.kind": "muon",
    "optim.beta2": 0.98,
    "optim.weight_decay": 0.05,
    "optim.schedule": "linear",
    "optim.min_ratio": 0.05,
    "optim.warmup_steps": 10,
}


def _learns(steps: int, rate: float, *, tokens: int | None = None, muon: float | None = None) -> dict[str, Any]:
    """`tokens`: of a batch. `muon`: its own rate, for the matrices."""
    keys = {"train.max_steps": steps, "optim.learning_rate": rate}
    keys |= {"batch.tokens": tokens} if tokens is not None else {}
    return keys | ({**_MUON, "optim.muon_learning_rate": muon} if muon is not None else {})


_CPU: dict[str, dict[str, Any]] = {
    "all": {
        "data.context_length": 128,
        "batch.micro": 8,
        "batch.tokens": 2048,
        "train.log_every": 10,
        "train.eval_every": 0,
        "train.eval_tokens": 65_536,
        "checkpoint.every": 20.0,
        "compute.compile": "off",
        "generate.new_tokens": 96,
        "generate.temperature": 1.0,
        "generate.rows": 128,
    },
    "tokenizer": {"tokenizer.vocab_size": 768, "tokenizer.train_megabytes": 8},
    "pretrain": {
        **_learns(1100, 3e-3, muon=0.02),
        "optim.warmup_steps": 20,
        "model.depth": 0,
        "model.layers": 4,
        "model.dim": 96,
        "model.heads": 3,
        "model.ff": 256,
    },
    "midtrain": {**_learns(160, 2e-3, muon=0.008), "train.eval_first": True},
    "sft": {**_learns(600, 2e-3, muon=0.006), "train.eval_first": True},
    # Both answers of a pair lie in one row, several pairs beside each other.
    "reward": {**_learns(60, 2e-3, tokens=4096, muon=0.002), "data.context_length": 256},
    "density": {"density.neighbours": 16, "density.clusters": 16},
    "grpo": {
        **_learns(32, 5e-4, tokens=0),
        "data.context_length": 192,
        "batch.micro": 32,
        "train.log_every": 1,
        "grpo.prompts_per_step": 16,
        "grpo.group": 8,
        "optim.schedule": "constant",
        "optim.warmup_steps": 3,
        "optim.weight_decay": 0.0,
    },
    "evaluate": {"data.context_length": 192, "batch.tokens": 0, "evaluate.draws": 2},
    "eval-base": {"evaluate.chat": False, "evaluate.shots": 0, "evaluate.draws": 0},
    "diversity": {"data.context_length": 192, "batch.tokens": 0, "diversity.most": 48, "diversity.answers": 6},
}
_GPU: dict[str, dict[str, Any]] = {
    "all": {
        "data.context_length": 512,
        "batch.micro": 64,
        "train.log_every": 10,
        "checkpoint.every": 30.0,
        "generate.new_tokens": 128,
        "generate.rows": 256,
    },
    "tokenizer": {"tokenizer.vocab_size": 4096, "tokenizer.train_megabytes": 64},
    "pretrain": {**_learns(1500, 1e-3, tokens=65_536), "model.depth": 8, "optim.warmup_ratio": 0.05},
    "midtrain": {**_learns(400, 6e-4, tokens=65_536), "train.eval_first": True},
    "sft": {**_learns(300, 3e-4, tokens=65_536), "train.eval_first": True},
    "reward": _learns(200, 2e-4, tokens=65_536),
    "density": {"density.neighbours": 32, "density.clusters": 32},
    "grpo": {**_learns(100, 3e-5), "train.log_every": 1, "grpo.prompts_per_step": 64, "grpo.group": 16},
    "evaluate": {"evaluate.draws": 4},
    "eval-base": {"evaluate.chat": False, "evaluate.draws": 0},
    "diversity": {"diversity.most": 128, "diversity.answers": 8},
}


def _real(depth: int, steps: int, micro: int) -> dict[str, dict[str, Any]]:
    """Real data: some 20 tokens per parameter for the base model."""
    return {
        "all": {
            "data.context_length": 2048,
            "batch.micro": micro,
            "generate.new_tokens": 512,
            "generate.rows": 128,
            "checkpoint.every": 900.0,
        },
        "tokenizer": {"tokenizer.vocab_size": 65_536, "tokenizer.train_megabytes": 1024},
        "pretrain": {"model.depth": depth, "batch.tokens": 524_288, "train.max_steps": steps, "train.eval_every": 1000},
        "midtrain": {**_learns(800, 2e-4, tokens=524_288), "train.eval_first": True},
        "sft": {**_learns(600, 5e-5, tokens=131_072), "train.eval_first": True},
        "reward": _learns(400, 2e-5, tokens=131_072),
        "density": {"density.neighbours": 64, "density.clusters": 64},
        "grpo": {**_learns(400, 2e-6), "train.log_every": 1, "grpo.prompts_per_step": 32, "grpo.group": 16},
        "evaluate": {"evaluate.draws": 4},
        "eval-base": {"evaluate.chat": False, "evaluate.shots": 4, "evaluate.draws": 0},
        "diversity": {"diversity.most": 256, "diversity.answers": 8},
    }


def _large(name: str, about: str, keys: dict[str, dict[str, Any]]) -> Preset:
    return Preset(name, about, "production", 2, 8.0, keys, gpus=True, data=True)


PRESETS: dict[str, Preset] = {
    one.name: one
    for one in (
        Preset("cpu", "a model of 0.5 M parameters on a CPU, ten minutes on two cores", "small", 0, 1.0, _CPU),
        Preset("gpu", "8 layers on one GPU, a quarter of an hour", "production", 1, 8.0, _GPU, gpus=True),
        _large("d20", "20 layers, 0.5 billion parameters, real data, 8 GPUs for hours", _real(20, 21_400, 16)),
        _large("d32", "32 layers, 1.7 billion parameters, real data, 8 GPUs for days", _real(32, 71_680, 8)),
    )
}


def choose(named: str | None, gpus: bool) -> tuple[Preset, str]:
    """The preset, and the line that says why."""
    if named is None:
        found = PRESETS["gpu" if gpus else "cpu"]
        others = ", ".join(name for name in PRESETS if name != found.name)
        why = "the default with GPUs" if gpus else "the default without a GPU"
        return found, f"preset {found.name}: {found.about}; {why} (--preset: {others})"
    if named not in PRESETS:
        raise Refusal(
            f"--preset: no preset {named!r}{suggest(named, PRESETS) or '; there are ' + ', '.join(PRESETS)}", EX_USAGE
        )
    return PRESETS[named], f"preset {named}: {PRESETS[named].about}"


def what_it_lacks(preset: Preset, gpus: bool, base: bool) -> Refusal | None:
    """`base`: there is text to pretrain on beside the built-in world's."""
    if preset.gpus and not gpus:
        return Refusal(
            f"preset {preset.name} needs a GPU and there is none to use: --preset cpu works here",
            EX_UNAVAILABLE,
            cause="gpu.too-few",
        )
    if preset.data and not base:
        wanted = (
            "--data FOLDER with text to pretrain on: .txt files, or .jsonl or .parquet files whose rows have `text`"
        )
        return Refusal(f"preset {preset.name} needs real data: {wanted}", EX_USAGE)
    return None
