"""Settings of a training run: layers, names, refusals, and the flags that ranks are started with."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from conftest import Stoker, gpu_json
from stoker.contract.errors import Refusal
from stoker.contract.frozen import options_of, replace
from stoker.control.plan.options import RunOptions
from stoker.training.config import aliases, amount
from stoker.training.config.amount import Amount
from stoker.training.config.check import check, check_data, check_needs
from stoker.training.config.derived import Situation, derivable
from stoker.training.config.files import without_comments
from stoker.training.config.flags import parse
from stoker.training.config.keys import BARE, DEFAULTS, KEYS, as_yaml, config_of, values_of
from stoker.training.config.layers import gather
from stoker.training.config.presets import ABOUT, PRESETS
from stoker.training.config.resolve import SHAPE, Resolved, combine, flags, model_shape, recipe_settings, settle
from stoker.training.config.schema import Config, NeedsConfig
from stoker.training.model.config import ModelConfig
from stoker.training.reward.pairs import PairRows, pairs_of
from stoker.training.stages import docs, table
from stoker.training.stages.registry import STAGES, learning
from stoker.training.stages.situation import with_defaults
from stoker.training.tokenizer.tokenizer import bytes_tokenizer

ROOT = Path(__file__).parent.parent
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2,
    "intermediate_size": 128, "vocab_size": 1024,
}  # fmt: skip


def resolve(argv: Sequence[str], environment: dict[str, str], gpus: bool) -> Resolved:
    return recipe_settings(argv, gpus, environment)


def config(*argv: str, environment: dict[str, str] | None = None, gpus: bool = False) -> Config:
    return resolve(argv, environment or {}, gpus).config


def value(made: Config, dotted: str) -> Any:
    return values_of(made)[dotted]


# ---- presets ----


def test_the_preset_is_production_with_gpus_and_small_without_and_is_said() -> None:
    here, there = resolve([], {}, True), resolve([], {}, False)
    assert (here.config.preset, there.config.preset) == ("production", "small")
    assert here.lines[0].startswith("preset production") and there.lines[0].startswith(
        "preset small: the default without a GPU"
    )
    assert config("--parallel.device", "cpu", gpus=True).preset == "small"
    assert resolve(["--debug"], {}, True).lines == ("preset debug (--debug)",)


def test_presets_are_what_the_notes_ask_for() -> None:
    debug, production = config("--debug"), config("--preset", "production")
    assert (
        (debug.model.layers, debug.train.max_steps, debug.train.log_every) == (2, 10, 1)
        and debug.nan.check
        and debug.train.debug
    )
    assert (production.model.layers, production.train.max_steps, production.batch.micro) == (32, 10_000, 0)
    assert production.model.kv_heads < production.model.heads
    assert list(ABOUT) == list(PRESETS) and all(name in KEYS for preset in PRESETS.values() for name in preset)


def test_stable_takes_any_shape_and_is_more_cautious_than_production() -> None:
    stable = config("--preset", "stable", "--model.layers", "7", "--model.dim", "640")
    assert (stable.model.layers, stable.model.dim, stable.model.heads, stable.model.head_dim) == (7, 640, 10, 64)
    normal = config("--preset", "production")
    assert (
        stable.optim.learning_rate < normal.optim.learning_rate
        and stable.optim.max_grad_norm < normal.optim.max_grad_norm
    )
    assert (
        stable.model.init_std < normal.model.init_std
        and stable.optim.warmup_ratio > normal.optim.warmup_ratio
        and stable.model.qk_norm
    )


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_passes_its_own_checks(preset: str) -> None:
    made = config("--preset", preset)
    check(made, {}, on_cpu=True)
    shape = [getattr(made.model, name) for name in SHAPE]
    assert all(number > 0 for number in shape) and made.model.vocab_size == 0


# ---- layers ----


def test_file_environment_and_flags_in_order(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("preset: debug\noptim:\n  learning_rate: 1e-4\n  beta1: 0.8\n  beta2: 0.9\n")
    environment = {"STOKER_TRAIN_OPTIM_BETA1": "0.7", "STOKER_TRAIN_OPTIM_BETA2": "0.6"}
    found = resolve(["--config", str(path), "--optim.beta2=0.5"], environment, False)
    made = found.config
    assert (made.preset, made.optim.learning_rate, made.optim.beta1, made.optim.beta2) == ("debug", 1e-4, 0.7, 0.5)
    assert found.given["optim.learning_rate"].words == f"config file {path}: optim.learning_rate"
    assert (
        found.given["optim.beta1"].words == "STOKER_TRAIN_OPTIM_BETA1"
        and found.given["optim.beta2"].words == "--optim.beta2"
    )
    assert config("--config", str(path), "--preset", "small").preset == "small"
    assert config(environment={"STOKER_TRAIN_PRESET": "stable", "STOKER_TRAIN_DATA_PATH": "a,b"}).data.path == (
        "a",
        "b",
    )


@pytest.mark.parametrize(
    ("argv", "dotted", "expected"),
    [
        (["--optim.learning_rate", "1e-4"], "optim.learning_rate", 1e-4),
        (["--optim.learning-rate=1e-4"], "optim.learning_rate", 1e-4),
        (["--learning-rate", "1e-4"], "optim.learning_rate", 1e-4),
        (["--lr=2e-3"], "optim.learning_rate", 2e-3),
        (["--max-steps", "10"], "train.max_steps", 10),
        (["--max_samples=1e3"], "data.max_samples", 1000),
        (["--data", "a.txt", "b.txt", "--data", "c"], "data.path", ("a.txt", "b.txt", "c")),
        (["--data.path=x", "--data=y"], "data.path", ("x", "y")),
        (["--train.profile"], "train.profile", True),
        (["--profile", "--max-steps", "3"], "train.profile", True),
        (["--nan.check", "false"], "nan.check", False),
        (["--checkpoint.every", "1h30m"], "checkpoint.every", 5400.0),
        (["--timeout", "10m"], "parallel.timeout", 600.0),
        (["--batch.micro", "auto"], "batch.micro", 0),
        (["--micro-batch", "auto"], "batch.micro", 0),
        (["--needs.vram", "40GB"], "needs.vram", 40 * 10**9),
        (["--use-amp", "false"], "compute.dtype", "fp32"),
        (["--warmup", "100"], "optim.warmup_steps", 100),
        (["--warmup", "0.2"], "optim.warmup_ratio", 0.2),
        (["--tokenizer", "bytes"], "tokenizer.path", "bytes"),
        (["--compute.compile", "on"], "compute.compile", "on"),
    ],
)
def test_flags_and_their_spellings(argv: list[str], dotted: str, expected: Any) -> None:
    found = value(config(*argv), dotted)
    assert found == expected and type(found) is type(expected)


NOTES = """// config of a single-GPU run
{
    "system": {"device": "cuda", "device_id": 3, "num_workers": 8},
    "training": {
        "batch_size": 4,         // larger batch since only one GPU
        "grad_accum_nums": 8, /* less
                                 accumulation */
        "learning_rate": 1e-4, "max_grad_norm": 0.7, "use_amp": false, "max_steps": 77, "warmup": 5,
    },
    "model": {"n_layers": 3, "init_std": 0.01, "context_length": 128},
    "optimizer": {"weight_decay": 0.05},
    "data": {"path": "https://example.org//a.txt", "text_key": "/* no comment */"}
}
"""


def test_the_notes_json_with_comments_and_names(tmp_path: Path) -> None:
    path = tmp_path / "notes.json"
    path.write_text(NOTES)
    found = resolve(["--config", str(path)], {}, True)
    expected = {
        "batch.micro": 4,
        "batch.accumulation": 8,
        "batch.tokens": 0,
        "optim.learning_rate": 1e-4,
        "optim.max_grad_norm": 0.7,
        "compute.dtype": "fp32",
        "train.max_steps": 77,
        "optim.warmup_steps": 5,
        "model.layers": 3,
        "model.init_std": 0.01,
        "data.context_length": 128,
        "optim.weight_decay": 0.05,
        "data.num_workers": 8,
        "parallel.device": "cuda",
        "data.path": ("https://example.org//a.txt",),
        "data.text_key": "/* no comment */",
    }
    assert {name: value(found.config, name) for name in expected} == expected
    assert found.run_options == {"gpu": "3"}
    path.write_text('{"device": "cpu", "device_id": 3}')
    assert resolve(["--config", str(path)], {}, True).run_options == {}


def test_comments_are_blanked_in_place() -> None:
    text = '{"a": "x//y", // c\n "b": "\\"/*", /* d\n */ "c": [1,2,],}'
    assert json.loads(without_comments(text)) == {"a": "x//y", "b": '"/*', "c": [1, 2]}
    assert len(without_comments(text)) == len(text) and without_comments(text).count("\n") == text.count("\n")


@pytest.mark.parametrize(
    ("text", "dotted", "expected"),
    [
        ("learning_rate: 1e-4", "optim.learning_rate", 1e-4),
        ("optim.learning-rate: 1e-4", "optim.learning_rate", 1e-4),
        ("batch: {tokens: 1e6}\ncontext_length: 1000", "batch.tokens", 1_000_000),
        ("compute: {compile: off, recompute: off}", "compute.compile", "off"),
        ("compute: {cuda_graphs: on}\ndevice: cuda", "compute.cuda_graphs", "on"),
        ("data: [a, b]", "data.path", ("a", "b")),
        ("data: a", "data.path", ("a",)),
        ("data: {path: [a], validation: 0}", "data.validation", "0"),
        ("batch: {micro: auto}", "batch.micro", 0),
        ("checkpoint: {every: 5m, resume: never}", "checkpoint.every", 300.0),
        ("debug: true", "train.max_steps", 10),
        ("optim:\n", "optim.beta1", 0.9),
        ("needs: {gpus: 4, vram: 40GB}", "needs.vram", 40 * 10**9),
        ("optim: {lr: 0.5}", "optim.learning_rate", 0.5),
        ("training: {seed: 4}", "train.seed", 4),
    ],
)
def test_yaml_files(tmp_path: Path, text: str, dotted: str, expected: Any) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    found = value(config("--config", str(path), gpus=True), dotted)
    assert found == expected and type(found) is type(expected)


def test_the_weaker_of_two_keys_counts_when_it_is_the_one_given() -> None:
    assert (
        config("--epochs", "2").train.max_steps == 0
        and config("--epochs", "2", "--max-steps", "7").train.max_steps == 7
    )
    assert config("--warmup-ratio", "0.5", environment={"STOKER_TRAIN_OPTIM_WARMUP_STEPS": "9"}).optim.warmup_steps == 0
    assert config("--grad-accum-nums", "4").batch.tokens == 0
    assert resolve(["--epochs", "2", "--max-steps", "5"], {}, False).lines[1:] == (
        "train.epochs 2.0 has no effect: train.max_steps 5 counts",
    )
    assert len(resolve(["--epochs", "2"], {"STOKER_TRAIN_TRAIN_MAX_STEPS": "5"}, False).lines) == 1
    kept = resolve(["--context-length", "300"], {}, False)  # small's 4096 tokens are no multiple
    assert kept.config.batch.tokens == 3900 and "batch.tokens 3900" in kept.lines[1]


# ---- the dial ----


@pytest.mark.parametrize(
    ("given", "expected"),
    [  # layers, dim, heads, kv_heads, head_dim, ff
        ({"depth": 2}, (2, 128, 2, 2, 64, 384)),
        ({"depth": 3}, (3, 256, 4, 4, 64, 704)),
        ({"depth": 12}, (12, 768, 12, 12, 64, 2048)),
        ({"depth": 16}, (16, 1024, 8, 8, 128, 2752)),
        ({"depth": 32}, (32, 2048, 16, 4, 128, 5504)),
        ({"depth": 32, "kv_heads": 0}, (32, 2048, 16, 16, 128, 5504)),
        ({"depth": 32, "dim": 4096}, (32, 4096, 32, 8, 128, 10944)),
        ({"depth": 12, "heads": 6, "ff": 100}, (12, 768, 6, 6, 128, 100)),
        (
            {"depth": 28, "dim": 1024, "heads": 16, "kv_heads": 8, "head_dim": 128, "ff": 3072},
            (28, 1024, 16, 8, 128, 3072),
        ),
        ({"depth": 4, "dim": 96}, (4, 96, 2, 2, 48, 256)),
        ({"depth": 0}, (12, 768, 12, 12, 64, 2048)),
        ({"depth": 0, "dim": 512}, (12, 512, 8, 8, 64, 1408)),
        ({}, (12, 768, 12, 12, 64, 2048)),
    ],
)
def test_the_dial_derives_what_is_not_given(given: dict[str, int], expected: tuple[int, ...]) -> None:
    model = model_shape(ModelConfig(**given), {f"model.{name}" for name in given})
    assert (
        model.layers,
        model.dim,
        model.heads,
        model.kv_heads,
        model.head_dim,
        model.ff,
    ) == expected and model.depth == given.get("depth", 0)


# ---- there and back ----


@pytest.mark.parametrize(
    "argv",
    [
        [], ["--debug"], ["--preset", "production", "--model.depth", "20"], ["--model.dim", "512", "--model.head_dim", "32", "--data=-a", "--data", "", "b c"],
        ["--epochs", "1"], ["--epochs", "2", "--max-steps", "500"], ["--batch.tokens", "8192", "--accumulation", "3"], ["--context-length", "300"],
        ["--checkpoint.every", "1ms", "--needs.vram", "40GB", "--micro-batch", "auto"], ["--depth", "32", "--kv-heads", "0"], ["--depth", "0"],
        ["--max-steps", "0"], ["--optim.eps", "1e-300", "--init-std", "0.1"], ["--heads", "2"], ["--preset", "stable", "--qk-norm", "false"],
    ],
)  # fmt: skip
def test_flags_lead_back_to_exactly_this_config(argv: list[str], tmp_path: Path) -> None:
    made = config(*argv)
    words = flags(made)
    assert words[:2] == ["--preset", made.preset] and recipe_settings(words, not made.preset, {}).config == made
    path = tmp_path / "written.yaml"
    path.write_text(as_yaml(made))
    assert config("--config", str(path)) == made
    without = [
        words[:at] + words[at + size :]
        for at in range(2, len(words))
        if words[at].startswith("--")
        for size in [1 if "=" in words[at] else 2]
    ]
    assert all(_or_refusal(*fewer) != made for fewer in without), "a flag too many"


def _or_refusal(*argv: str) -> Config | str:
    try:
        return config(*argv)
    except Refusal as refusal:
        return refusal.line


def test_short_words_for_plain_wishes() -> None:
    assert flags(config("--debug", "--data", "x.txt")) == ["--preset", "debug", "--data.path", "x.txt"]
    assert flags(config("--preset", "production", "--model.depth", "24")) == [
        "--preset",
        "production",
        "--model.depth",
        "24",
    ]
    assert flags(config("--epochs", "2")) == ["--preset", "small", "--train.epochs", "2.0"]


def test_any_values_lead_back() -> None:
    rng = random.Random(5)
    for _ in range(60):
        preset = rng.choice(list(PRESETS))
        told: dict[str, Any] = {}
        for name in rng.sample(list(KEYS), rng.randint(0, 25)):
            key = KEYS[name]
            if key.spec.choices:
                told[name] = rng.choice(key.spec.choices)
            elif name == "parallel.comm":
                told[name] = rng.choice(["full", "bf16", "local:8"])
            elif name == "compute.recompute":
                told[name] = rng.choice(["auto", "off", "full", "7"])
            elif key.kind == "bool":
                told[name] = rng.random() < 0.5
            elif key.kind == "int":
                told[name] = rng.choice([0, 1, 2, 64, 4096])
            elif key.kind == "float":
                told[name] = rng.choice([0.0, 1e-5, 0.3, 12345.678])
            else:
                texts = ["", "a b", "--x", "o'k\n", "ü", "yes", "\x7f😀", "#", "1"]
                told[name] = tuple(rng.sample(texts, 2)) if key.spec.many else rng.choice(texts)
        made = config_of(preset, combine(preset, [told]))
        assert settle(gather(parse(flags(made)), {}), False).config == made


def test_the_page_is_current_complete_and_a_config_file() -> None:
    path = ROOT / "docs" / "config.yaml"
    assert path.read_text() == docs.page(), "python -m stoker.training.stages.docs > docs/config.yaml"
    made = config("--config", str(path))
    assert values_of(made) == DEFAULTS | {
        f"model.{name}": number for name, number in (("kv_heads", 12), ("head_dim", 64), ("ff", 2048))
    }


def test_bare_names_mean_one_thing() -> None:
    run = set(options_of(RunOptions)) | {
        flag.lstrip("-") for spec in options_of(RunOptions).values() for flag in spec.flags
    }
    assert not run & {*aliases.names(), *aliases.SECTION_VALUES, "preset"}
    assert not set(BARE) & {*aliases.RENAMED, *aliases.TRANSLATED} and all(
        target in KEYS for target in aliases.RENAMED.values()
    )
    assert all(key.spec.limit is not None for key in KEYS.values() if key.kind in ("int", "float"))


def test_a_stages_own_default_gives_way_to_what_was_said_even_if_that_is_the_presets() -> None:
    defaults = STAGES["sft"].defaults
    assert settle(gather(parse([]), {}), False, defaults).config.data.kind == "chat"
    told = settle(gather(parse(["--data.kind", "stream"]), {}), False, defaults).config
    assert told.data.kind == "stream"
    assert (
        recipe_settings(flags(told, defaults), False, {}, defaults=defaults).config == told
    )  # what the ranks of `stoker train sft` make of it


# ---- a stage's defaults ----

TINY = ModelConfig(
    load="hf", layers=4, dim=96, heads=3, kv_heads=3, head_dim=32, ff=256, vocab_size=768
)  # 0.5 M parameters
LARGE = ModelConfig(
    load="hf", layers=32, dim=4096, heads=32, kv_heads=8, head_dim=128, ff=14_336, vocab_size=128_256, tied=False
)  # 8 B


def staged(
    stage: str,
    *argv: str,
    samples: int = 40,
    count: int = 200,
    model: ModelConfig = TINY,
    ranks: int | None = 1,
    gpus: bool = False,
) -> tuple[Config, list[str]]:
    found = settle(
        gather(parse(["--model.load", "hf", *argv] if stage != "pretrain" else argv), {}), gpus, STAGES[stage].defaults
    )
    unit = {"pretrain": "tokens", "reward": "pairs", "grpo": "prompts"}.get(stage, "conversations")
    made, _, lines = with_defaults(
        stage, found.config, found.given, Situation(model, Amount(samples, count, unit), ranks), not gpus
    )
    check(made, found.given, on_cpu=not gpus)
    return made, lines


@pytest.mark.parametrize(
    ("stage", "model", "rate"),
    [("sft", TINY, 1.3e-4), ("sft", LARGE, 1.2e-5), ("midtrain", TINY, 1e-3), ("midtrain", LARGE, 4.8e-5), ("reward", TINY, 4.4e-4), ("reward", LARGE, 5.9e-6),
     ("grpo", TINY, 4.4e-5), ("grpo", LARGE, 5.9e-7), ("pretrain", TINY, 1e-3)],
)  # fmt: skip
def test_the_learning_rate_follows_from_stage_and_size(stage: str, model: ModelConfig, rate: float) -> None:
    assert staged(stage, model=model)[0].optim.learning_rate == pytest.approx(rate)
    assert staged(stage, "--learning-rate", "0.5", model=model)[0].optim.learning_rate == 0.5
    assert staged(stage, "--preset", "stable", model=model)[0].optim.learning_rate == pytest.approx(
        rate / 3 if stage != "pretrain" else 1e-4, rel=0.05
    )


def test_200_chats_are_passed_over_three_times_and_not_275() -> None:
    made, lines = staged("sft")
    assert (made.train.max_steps, made.train.epochs, made.batch.tokens) == (0, 3.0, 256)
    assert (
        "3 passes over your 200 conversations" in lines[4]
        and "--epochs or --max-steps" in lines[4]
        and not any("warning" in line for line in lines)
    )
    asked, lines = staged("sft", "--max-steps", "10000", "--batch.tokens", "4096")
    assert (asked.train.max_steps, asked.batch.tokens) == (10_000, 4096)
    assert (
        lines[-1].startswith("warning: 4,000 passes over your 200 conversations")
        and "--epochs 3 is the default" in lines[-1]
    )
    assert "you set it" in lines[4] and "sft's default" in lines[1]


def test_what_is_given_wins_over_what_is_derived(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("train: {epochs: 7}\nbatch: {accumulation: 2}\n")
    made, _ = staged("sft", "--config", str(path))
    assert (made.train.epochs, made.train.max_steps, made.batch.tokens, made.batch.accumulation) == (7.0, 0, 0, 2)
    assert made.optim.learning_rate == 1.3e-4
    assert staged("sft", "--config", str(path), "--max-steps", "5")[0].train.max_steps == 5
    assert staged("sft", "--optim.kind", "muon")[0].optim.muon_learning_rate == pytest.approx(
        1.3e-4 * 96**0.5, rel=0.05
    )
    assert staged("sft", "--optim.kind", "muon", "--muon-learning-rate", "0.3")[0].optim.muon_learning_rate == 0.3


def test_debug_keeps_its_ten_steps_in_every_stage() -> None:
    for stage in learning():
        made, _ = staged(stage, "--debug")
        assert (made.train.max_steps, made.batch.tokens, made.batch.micro) == (10, 512, 2), stage


@pytest.mark.parametrize(
    ("samples", "tokens", "steps", "epochs"),
    [(8, 256, 0, 4.0), (120, 512, 0, 4.0), (3000, 4096, 500, 1.0), (10**6, 4096, 500, 1.0)],
)
def test_small_text_is_read_four_times_at_most_and_large_text_as_the_preset_says(
    samples: int, tokens: int, steps: int, epochs: float
) -> None:
    made, _ = staged("pretrain", samples=samples)
    assert (made.batch.tokens, made.train.max_steps, made.train.epochs) == (tokens, steps, epochs)


def test_a_batch_grows_with_the_data_and_not_with_the_ranks() -> None:
    def of(samples: int, ranks: int | None) -> int:
        return staged("sft", "--preset", "production", samples=samples, ranks=ranks)[0].batch.tokens // 2048

    wanted = {10: 1, 100: 2, 5000: 32, 150_000: 128, 10**9: 256}
    assert all(of(samples, ranks) == rows for samples, rows in wanted.items() for ranks in (1, 8, None))


@pytest.mark.parametrize(("prompts", "steps"), [(8, 2), (100, 31), (1000, 100), (4000, 125), (10**6, 1000)])
def test_grpo_steps_follow_from_the_prompts(prompts: int, steps: int) -> None:
    made, lines = staged("grpo", samples=prompts, count=prompts)
    assert (
        made.train.max_steps == steps
        and f"{steps:,} steps" in lines[4]
        and not any("warning" in line for line in lines)
    )


@pytest.mark.parametrize("stage", learning())
def test_ranks_are_told_all_that_was_derived_and_derive_nothing(stage: str) -> None:
    for argv in ([], ["--epochs", "2"], ["--max-steps", "9"], ["--accumulation", "3"], ["--debug"]):
        made, _ = staged(stage, *argv)
        keep = (*STAGES[stage].defaults, *derivable(STAGES[stage].learning))
        found = recipe_settings(flags(made, keep), False, {}, defaults=STAGES[stage].defaults)
        assert found.config == made and set(derivable(STAGES[stage].learning)) <= set(found.given)


def test_the_start_prints_when_it_validates() -> None:
    def row(*argv: str, held_out: int | None = 500) -> str:
        found = settle(gather(parse(["--model.load", "hf", *argv]), {}), False, STAGES["sft"].defaults)
        at = Situation(TINY, Amount(40, 200, "conversations", held_out=held_out), 1)
        lines = with_defaults("sft", found.config, found.given, at, True)[2]
        (line,) = [line for line in lines if line.split()[0] == "validation"]
        return line

    assert "at the end only" in row("--preset", "small", "--max-steps", "63"), "preset small validates every 100 steps"
    assert "at the end only" in row("--max-steps", "20", "--eval-every", "20")
    assert "every 20 steps, 4 times" in row("--max-steps", "63", "--eval-every", "20")
    assert "none" in row(held_out=0) and "--data.validation" in row(held_out=0)


def test_automatic_validations_of_adapters_take_a_tenth_of_the_run_at_most() -> None:
    """By tokens: a validation reads what is held out, and answers 3 prompts with a pass over them for each of 64 tokens."""
    made, lines = staged("sft", "--lora")  # 40 rows: a validation would cost as much as 20 steps
    assert made.train.eval_every == 0 and any("validation" in line and "at the end only" in line for line in lines)
    made, lines = staged("sft", "--lora", samples=2000, count=10_000)
    steps = made.train.epochs * 2000 * made.data.context_length / made.batch.tokens
    assert made.train.eval_every == -(-steps // 10) and any("10 times" in line for line in lines), lines
    between, _ = staged("sft", "--lora", samples=500, count=2500)
    steps = between.train.epochs * 500 * between.data.context_length / between.batch.tokens
    assert 2 <= steps / between.train.eval_every < 10
    assert staged("sft", "--lora", "--patience", "3")[0].train.eval_every > 0  # it needs validations
    assert staged("sft", "--lora", "--eval-every", "7")[0].train.eval_every == 7


def test_data_that_is_not_here_yet_leaves_the_length_open() -> None:
    found = settle(gather(parse(["--model.load", "hf"]), {}), False, STAGES["sft"].defaults)
    made, derived, lines = with_defaults("sft", found.config, found.given, Situation(TINY, None, 1), True)
    assert (
        derived == {"optim.learning_rate": 1.3e-4}
        and made.train.max_steps == 500
        and "not on this machine yet" in lines[0]
    )
    assert "known once the data is here" in lines[4] and "at most" in lines[3] and "500" not in "".join(lines)


def test_the_table_in_the_docs_is_what_the_rules_give() -> None:
    text = (ROOT / "docs" / "pipeline.md").read_text()
    shown = text.partition(table.BEGIN + "\n")[2].partition(table.END)[0]
    assert shown == table.table(), "python -m stoker.training.stages.table prints it"


def test_no_case_of_the_table_is_absurd() -> None:
    for line in table.table().splitlines()[2:]:
        stage, _, preset, _, _, rate, _, steps, passes = [cell.strip() for cell in line.strip("|").split("|")]
        assert 2e-7 <= float(rate) <= 1e-3 and float(passes) <= 10, line
        assert preset == "debug" or 10 <= int(steps.replace(",", "")) <= 10_000, line
        assert stage != "sft" or preset == "debug" or float(passes) == 3, line


def test_a_debug_run_of_grpo_samples_few_short_completions() -> None:
    made = config("--debug")
    assert made.train.max_steps * made.grpo.prompts_per_step * made.grpo.group <= 160 and made.generate.new_tokens <= 32
    given = config("--debug", "--grpo.group", "8")
    assert given.grpo.group == 8, "what is set wins"


def test_files_are_counted_before_they_are_prepared(tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text(('{"messages": ' + "x" * 387 + "}\n") * 100 + "\n")
    made = config(
        "--data",
        str(chats),
        "--data.kind",
        "chat",
        "--data.validation",
        "0.1",
        "--context-length",
        "128",
        "--batch.tokens",
        "128",
    )
    found = amount.estimated(made, 1024)
    assert (
        found is not None
        and found.count == 90
        and found.unit == "conversations"
        and not found.exact
        and 60 <= found.samples <= 90
    )
    assert amount.estimated(config("--data", "someone/data-set"), 1024) is None
    made = config("--grpo.prompts", str(chats), "--max-samples", "30")
    assert amount.of_prompts(made).count == 30


def test_pairs_are_counted_as_training_packs_them(tmp_path: Path) -> None:
    """Some pairs are short, some long, some too long for a row."""
    rows = [
        {"prompt": "how many?", "chosen": "two " * n, "rejected": "ten"}
        for n in (1, 30, 5, 60, 2, 200)
        for _ in range(20)
    ]
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for held_out in ("", str(pairs)):
        for stage in ("dpo", "reward"):
            flags = (f"--{stage}.pairs", str(pairs), f"--{stage}.held_out", held_out, "--context-length", "400")
            made = config(*flags, "--tokenizer.path", "bytes")
            train, measured = pairs_of(str(pairs), held_out, bytes_tokenizer(), 400, stage, lambda line: None)
            found = amount.of_pairs(made, stage, "bytes", 272)
            assert found.exact and found.count == len(train) == (100 if held_out else 90)
            assert found.samples == len(PairRows(train, 400, 0)) < found.count
            assert found.tokens == sum(pair.size for pair in train) and found.held_out == sum(p.size for p in measured)
            limited = replace(made, data=replace(made.data, max_samples=3))
            assert amount.of_pairs(limited, stage, "bytes", 272).samples == 3
            guess = amount.of_pairs(made, stage, "", 272)
            assert not guess.exact and guess.how and guess.count == found.count


def test_of_a_large_file_of_pairs_a_sample_is_tokenized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = tmp_path / "pairs.jsonl"
    rows = [{"prompt": "how many?", "chosen": "two " * (1 + n % 37), "rejected": "ten"} for n in range(3000)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = config("--dpo.pairs", str(pairs), "--context-length", "600", "--tokenizer.path", "bytes")
    exact = amount.of_pairs(made, "dpo", "bytes", 272)
    monkeypatch.setattr(amount, "ENCODED_PAIRS", 1000)
    monkeypatch.setattr(amount, "SAMPLED_PAIRS", 300)
    sample = amount.of_pairs(made, "dpo", "bytes", 272)
    assert exact.exact and not sample.exact and "300 of its 3,000 pairs" in sample.how
    for name in ("samples", "count", "tokens", "held_out"):
        assert getattr(sample, name) == pytest.approx(getattr(exact, name), rel=0.03), name
    limited = replace(made, data=replace(made.data, max_samples=7))
    assert amount.of_pairs(limited, "dpo", "bytes", 272).samples == 7


# ---- refusals ----


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--optim.learning_rate", "fast"], "--optim.learning_rate: 'fast' is not a number"),
        (["--max-steps", "2.5"], "--max-steps: '2.5' is not a whole number"),
        (["--micro-batch", "few"], "--micro-batch: 'few' is not a whole number or auto"),
        (["--batch.micro", "0"], "0 is not auto or a number from 1 up"),
        (["--optim.kind", "sgd"], "--optim.kind: 'sgd' is not one of adamw, adamw8bit, muon"),
        (["--profile", "maybe"], "--profile: 'maybe' is not true or false"),
        (["--lerning_rate", "1"], "did you mean --learning_rate?"),
        (["--optim.lerning-rate", "1"], "did you mean --optim.learning-rate?"),
        (["--seed", "1"], "--seed: it could be data.seed or train.seed"),
        (["--lora", "--qlora"], "--lora and --qlora exclude each other: adapter.method is lora or qlora"),
        (
            ["--wandb", "--mlflow"],
            "exclude each other: train.log_to is wandb or mlflow; for both: --train.log_to wandb,mlflow",
        ),
        (["--preset", "stabel"], "--preset: no preset 'stabel' (did you mean stable?)"),
        (["--learning-rate", "0"], "--learning-rate: optim.learning_rate 0.0 is out of range: above 0"),
        (["--learning-rate", "nan"], "out of range"),
        (["--learning-rate=-1e-4"], "out of range: above 0"),
        (["--dropout", "1"], "model.dropout 1.0 is out of range: from 0 to below 1"),
        (["--context-length", "1"], "data.context_length 1 is out of range: from 2 to 1e+09"),
        (
            ["--heads", "3"],
            "--heads: model.heads 3 does not divide model.dim 256: heads of 1, 2, 4, 8 do, or give model.head_dim",
        ),
        (["--heads", "0"], "model.heads 0 is out of range"),
        (["--layers", "0"], "model.layers 0 is out of range"),
        (["--heads", "4", "--kv-heads", "3"], "model.kv_heads 3 does not divide model.heads 4: 1, 2, 4 do"),
        (["--head-dim", "7", "--heads", "2"], "model.head_dim 7 is odd"),
        (["--dim", "101"], "--dim: model.dim 101 is odd"),
        (["--max-steps", "0", "--epochs", "0"], "neither train.max_steps nor train.epochs"),
        (["--batch.tokens", "1000"], "batch.tokens 1000 is not a multiple of data.context_length 256: 768 or 1024 is"),
        (["--batch.tokens", "100"], "data.context_length 256: 256 is"),
        (["--fp8", "tensorwise"], "--fp8: compute.fp8 tensorwise needs a GPU"),
        (["--strategy", "fsdp", "--cuda-graphs", "on"], "exclude each other"),
        (
            ["--compile", "fused", "--fp8", "tensorwise"],
            "compute.compile fused and compute.fp8 tensorwise exclude each other",
        ),
        (["--log-to", "tensorboard,wandbb"], "'wandbb' is not one of"),
        (["--inject", "layers.1"], "WHERE@STEP"),
        (["--inject", "NaN:layers.1@1"], "WHERE@STEP"),
        (
            ["--inject", "layers.1.attention@500"],
            "nan.inject layers.1.attention@500: there is no step 500: the run's are 0 to 499",
        ),
        (["--inject", "layers.4.mlp@1"], "there is no layer 4: the model's are 0 to 3"),
        (["--inject", "layers.1.mpl@1"], "the model has no module layers.1.mpl (did you mean layers.1.mlp?)"),
        (["--inject", "grad:layers.1.attention@1"], "the model has no parameter layers.1.attention"),
        (["--validation", "1.5"], "data.validation 1.5"),
        (["--validation", "50%"], "--validation: data.validation 50% is a percentage: write the share, 0.5"),
        (["--tokenizer.vocab_size", "100"], "tokenizer.vocab_size 100 is out of range: from 260 to 1e+09"),
        (
            ["--train.seed", "1e20"],
            "--train.seed: train.seed 100000000000000000000 is out of range: from 0 to 9.22337e+18",
        ),
        (["--max-steps", "1e23"], "is out of range: from 0 to 1e+09"),
        (["--batch.tokens", "1e23"], "is out of range: from 0 to 1e+15"),
        (["--layers", "9" * 400], "is out of range: from 1 to 1e+09"),
        (["--config", "a", "--config", "b"], "one config file"),
        (["--warmup", "long"], "number of steps"),
        (["stray"], "stray"),
        (["--max-steps"], "--max-steps"),
    ],
)
def test_a_flag_that_cannot_be_is_one_line_and_64(argv: list[str], says: str) -> None:
    with pytest.raises(Refusal) as refusal:
        config(*argv)
    assert says in refusal.value.line and "\n" not in refusal.value.line and refusal.value.code == 64


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lerning_rate: 1", "unknown key 'lerning_rate' (did you mean learning_rate?)"),
        ("optim: {lerning_rate: 1}", "unknown key 'optim.lerning_rate' (did you mean learning_rate?)"),
        ("training: {bach_size: 1}", "unknown key 'training.bach_size' (did you mean batch_size?)"),
        ("optimm: {beta1: 1}", "unknown section 'optimm' (did you mean optim?)"),
        ("optim: {context_length: 1}", "unknown key 'optim.context_length'"),
        ("optim: {beta1: 2}", "optim.beta1: optim.beta1 2.0 is out of range"),
        ("optim: {beta1: [1]}", "[1] is not a single value"),
        ("train: {max_steps: true}", "'true' is not a whole number"),
        ("compute: {fp8: on}", "'on' is not one of off, tensorwise"),
        ("vocab_size: 5", "model.vocab_size or tokenizer.vocab_size"),
        ("batch_size: 4\nbatch: {micro: 8}", "batch.micro says batch.micro is 8, and it was 4 before"),
        ("run: 3", "options of `stoker run`"),
        ("device_id: first", "not the number of a GPU"),
        ("preset: huge", "no preset 'huge'"),
    ],
)
def test_a_file_that_cannot_be_is_one_line_and_78(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(Refusal) as refusal:
        config("--config", str(path))
    assert (
        says in refusal.value.line
        and refusal.value.line.startswith(f"config file {path}: ")
        and refusal.value.code == 78
    )


@pytest.mark.parametrize(("name", "text", "code", "says"), [
    ("a.json", '{"a": 1,\n "b" 2}', 65, "is not JSON at line 2, column 6"), ("a.yaml", "a: [1,\n", 65, "is not YAML"), ("b.yaml", "- 1", 65, "holds a list"),
    ("c.json", "[1]", 65, "holds a list"), ("d.json", "", 65, "is not JSON"), ("e.json", '{"a": 1 /* no end', 65, "is not JSON"),
])  # fmt: skip
def test_a_file_that_does_not_parse(tmp_path: Path, name: str, text: str, code: int, says: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(Refusal, match="config file") as refusal:
        config("--config", str(tmp_path / name))
    assert says in refusal.value.line and refusal.value.code == code


def test_a_variable_with_a_typo_is_refused() -> None:
    with pytest.raises(
        Refusal,
        match="unknown variable STOKER_TRAIN_OPTIM_LERNING_RATE \\(did you mean STOKER_TRAIN_OPTIM_LEARNING_RATE",
    ):
        config(environment={"STOKER_TRAIN_OPTIM_LERNING_RATE": "1"})
    with pytest.raises(Refusal, match="STOKER_TRAIN_TRAIN_MAX_STEPS: 'x' is not a whole number") as refusal:
        config(environment={"STOKER_TRAIN_TRAIN_MAX_STEPS": "x"})
    assert refusal.value.code == 78


def test_what_only_the_data_can_tell() -> None:
    found = resolve(["--model.vocab_size", "300", "--context-length", "256"], {}, False)
    check_data(found.config, 257, 300, found.given)
    with pytest.raises(Refusal, match=r"data\.context_length 256 is longer than the data: 256 tokens") as refusal:
        check_data(found.config, 256, 300, found.given)
    assert refusal.value.code == 65
    with pytest.raises(
        Refusal, match=r"--model\.vocab_size: model\.vocab_size 300 is too small for the tokenizer's 301 tokens"
    ) as refusal:
        check_data(found.config, 257, 301, found.given)
    assert refusal.value.code == 64


@pytest.mark.parametrize(
    ("argv", "packed", "says"),
    [
        (
            ["--micro-batch", "1000000", "--batch.tokens", "0"],
            None,
            "a step of 1,000,000 samples or more is 3,584 epochs of the data's 279",
        ),
        (["--micro-batch", "27900", "--batch.tokens", "0"], None, ""),
        (["--accumulation", "14000"], None, "--accumulation: a step of 28,000 samples"),
        (["--batch.tokens", "7168000"], None, "--batch.tokens: a step of 28,000 samples"),
        (["--micro-batch", "500", "--batch.tokens", "0"], 4, "is 125 epochs of the data's 4"),
        (["--micro-batch", "101", "--batch.tokens", "0", "--max-samples", "1"], None, "is 101 epochs of the data's 1"),
        (["--micro-batch", "64", "--max-samples", "1"], None, ""),
        (["--max-samples", "1", "--preset", "production"], None, ""),
    ],
)
def test_a_step_of_hundreds_of_epochs_is_refused_where_somebody_asked_for_it(
    argv: list[str], packed: int | None, says: str
) -> None:
    found = resolve(["--preset", "debug", *argv] if "--preset" not in argv else argv, {}, True)
    if not says:
        return check_data(found.config, 279 * 256 + 1, 300, found.given, packed)
    with pytest.raises(Refusal) as refusal:
        check_data(found.config, 279 * 256 + 1, 300, found.given, packed)
    assert says in refusal.value.line and refusal.value.code == 64
    return None


@pytest.mark.parametrize(
    ("gpus", "vram", "cards", "says"),
    [
        (4, 0, [80] * 3, "4 GPUs needed, this machine has 3"),
        (1, 0, [], "this machine has none"),
        (0, 40, [], "this machine has none"),
        (0, 40, [24, 16], "a GPU with 37.3 GiB of memory needed, the largest here have 22.4 GiB"),
        (2, 40, [48, 24], "2 GPUs with 37.3 GiB of memory needed, the largest here have 44.7 GiB, 22.4 GiB"),
        (2, 40, [48, None], ""),
        (0, 0, [], ""),
        (2, 40, [48, 24, 48], ""),
    ],
)
def test_needs(gpus: int, vram: int, cards: list[int | None], says: str) -> None:
    memory = [None if size is None else size * 10**9 for size in cards]
    needs = NeedsConfig(gpus, vram * 10**9)
    if not says:
        return check_needs(needs, memory)
    with pytest.raises(Refusal) as refusal:
        check_needs(needs, memory)
    assert says in refusal.value.line and refusal.value.code == 69
    return None


# ---- the command ----

DRY = ("train", "pretrain", "--data", "text.txt", "--dry-run", "--no-preflight")


@pytest.fixture
def trainer(stoker: Stoker) -> Stoker:
    stoker.script("text.txt", "all the world's a stage\n" * 40)
    return stoker


def test_a_dry_run_shows_preset_config_and_command_and_makes_nothing(trainer: Stoker) -> None:
    done = trainer(*DRY, "--max-steps", "7", "--nproc-per-node", "2", env={"STOKER_TRAIN_OPTIM_BETA1": "0.8"})
    assert done.code == 0, done.err
    assert (
        "preset small: the default without a GPU" in done.err
        and "  max_steps: 7\n" in done.out
        and "  beta1: 0.8\n" in done.out
    )
    command = "-P -m stoker.training.recipes.pretrain --preset small --data.path text.txt --batch.tokens 256 --optim.beta1 0.8 --train.max_steps 7"
    assert f"would start 2 ranks of: {sys.executable} {command} " in done.out
    assert sorted(path.name for path in trainer.cwd.iterdir()) == ["machine.json", "text.txt"]
    assert (
        "pretrain: 4." in done.err
        and "passes over about" in done.err
        and "you set it; --epochs or --max-steps" in done.err
    ), done.err
    # Of some 165 keys those of this stage that matter: as a config file they make the same configuration again.
    shown = done.out[done.out.index("preset: small") :]
    assert shown.count("\n") < 60 and "grpo:" not in shown and "`stoker docs config` prints them" in shown
    trainer.script("again.yaml", shown)
    again = trainer(
        "train", "pretrain", "--config", "again.yaml", "--dry-run", "--no-preflight", "--nproc-per-node", "2"
    )
    assert again.code == 0 and again.out[again.out.index("preset: small") :] == shown, again.err
    (trainer.cwd / "again.yaml").unlink()
    plan = json.loads(trainer(*DRY, "--json").out)
    assert plan["argv"][1:6] == ["-P", "-m", "stoker.training.recipes.pretrain", "--preset", "small"]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--tokenizer.path", "/nope"], 66, "tokenizer /nope does not exist"),
        (["--checkpoint.resume", "/nope"], 66, "checkpoint.resume /nope: there is no checkpoint"),
        (["--data.validation", "nope.txt"], 66, "nope.txt does not exist"),
        (["--nproc-per-node", "0"], 64, "--nproc-per-node must be a number of ranks"),
        (["--device_id", "3"], 69, "GPUs were requested, but this machine has none"),
    ],
)
def test_a_dry_run_refuses_what_the_run_would_and_prints_no_config_before(
    trainer: Stoker, words: list[str], code: int, says: str
) -> None:
    done = trainer(*DRY, *words)
    assert done.code == code and says in done.err and done.out == "", done.out + done.err


def test_gpus_and_the_file_choose_the_plan(trainer: Stoker, box: Callable[..., dict[str, str]]) -> None:
    assert (
        "would start 4 ranks" in trainer(*DRY, env=box(4)).out and "preset production" in trainer(*DRY, env=box(4)).err
    )
    trainer.script(
        "one.json", '{"system": {"device": "cuda", "device_id": 2}, "run": {"name": "from-file", "max-restarts": 3}}'
    )
    done = trainer(*DRY, "--config", "one.json", env=box(4))
    assert "would start 1 rank of: " in done.out and "rank 0  GPU2" in done.out and "from-file" in done.out
    assert "rank 0  GPU1" in trainer(*DRY, "--config", "one.json", "--gpus", "1", env=box(4)).out
    cpu = trainer(*DRY, "--device", "cpu", "--nproc-per-node", "3", env=box(4))
    assert "rank 2  CPU2" in cpu.out and "preset small" in cpu.err, cpu.err
    assert "preset small" in trainer(*DRY, env={**box(4), "CUDA_VISIBLE_DEVICES": ""}).err
    assert "preset small" in trainer(*DRY, "--nproc-per-node", "cpu", env=box(4)).err


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["pretrian"], 64, "unknown stage 'pretrian' (did you mean pretrain?)"),
        (["--debug", "pretrain"], 64, "the stage must come first"),
        (["pretrain"], 64, "the data is missing; name files, a folder or a hub id with --data"),
        (["pretrain", "--data", "none.txt"], 66, "none.txt does not exist"),
        (["pretrain", "--data", "text.txt", "--lerning_rate", "1"], 64, "did you mean --learning_rate?"),
        (["pretrain", "--data", "text.txt", "--nprc-per-node", "1"], 64, "did you mean --nproc-per-node?"),
        (["pretrain", "--data", "text.txt", "--config", "typo.yaml"], 78, "did you mean learning_rate?"),
        (
            ["pretrain", "--data", "text.txt", "--config", "run.yaml"],
            78,
            "run: unknown key 'max_restart' (did you mean max_restarts?)",
        ),
        (
            ["pretrain", "--data", "text.txt", "--config", "module.yaml"],
            78,
            "run.module does not apply to stoker train",
        ),
        (["pretrain", "--data", "text.txt", "--config", "absent.yaml"], 66, "absent.yaml does not exist"),
        (
            ["pretrain", "--data", "text.txt", "--config", "needs.yaml"],
            69,
            "needs.yaml: needs.gpus: 4 GPUs needed, this machine has none; --needs.gpus 0",
        ),
        (
            ["pretrain", "--data", "text.txt", "--device", "cuda"],
            69,
            "parallel.device is cuda, but there is no usable GPU",
        ),
        (
            ["pretrain", "--data", "text.txt", "--device", "cpu", "--gpu", "0"],
            64,
            "parallel.device is cpu, but --gpu selects GPUs",
        ),
        (["pretrain", "--data", "text.txt", "-m"], 64, "-m"),
        (
            ["pretrain", "--data", "text.txt", "--nan.inject", "layers.1.attention@1@7"],
            64,
            "there is no rank 7: the run has one, 0",
        ),
        (
            ["pretrain", "--data", "text.txt", "--nan.inject", "embed@1@2", "--nproc-per-node", "2"],
            64,
            "there is no rank 2: the run's are 0 to 1",
        ),
    ],
)
def test_what_cannot_be_trained_is_one_line_before_anything_starts(
    trainer: Stoker, words: list[str], code: int, says: str
) -> None:
    for name, text in (
        ("typo.yaml", "lerning_rate: 1\n"),
        ("run.yaml", "run: {max_restart: 3}\n"),
        ("needs.yaml", "needs: {gpus: 4, vram: 40GB}\n"),
        ("module.yaml", "run: {module: true}\n"),
    ):
        trainer.script(name, text)
    before = sorted(path.name for path in trainer.cwd.iterdir())
    done = trainer("train", *words)
    assert done.code == code and says in done.err and done.err.startswith("stoker: ") and done.err.count("\n") == 1, (
        done.err
    )
    assert sorted(path.name for path in trainer.cwd.iterdir()) == before


def test_needs_look_at_the_machine(trainer: Stoker, box: Callable[..., dict[str, str]]) -> None:
    trainer.script("needs.yaml", "needs: {gpus: 2, vram: 40GB}\n")
    assert trainer(*DRY, "--config", "needs.yaml", env=box(2)).code == 0
    small = box([gpu_json(0), gpu_json(1, memory_total=24 * 10**9)])
    done = trainer(*DRY, "--config", "needs.yaml", env=small)
    assert (
        done.code == 69
        and "2 GPUs with 37.3 GiB of memory needed, the largest here have 44.7 GiB, 22.4 GiB" in done.err
    )


def test_the_launcher_never_imports_torch(trainer: Stoker) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "stoker", *DRY],
        cwd=trainer.cwd,
        env=trainer.env,
        capture_output=True,
        text=True,
        check=False,
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert done.returncode == 0 and "stoker.training.config.resolve" in imported
    assert not {"torch", "numpy", "yaml", "transformers"} & imported


def test_help_lists_options_and_keys_with_defaults(stoker: Stoker) -> None:
    done = stoker("train", "pretrain", "--help-all", env={"COLUMNS": "300"})
    assert (
        done.code == 0
        and "--nproc-per-node" in done.out
        and "--optim.learning_rate RATE" in done.out
        and "(default: 0.001; derived: with model.load 8e-05" in done.out
    )
    others = ("reward", "dpo", "density", "grpo", "evaluate", "diversity")  # sections of other stages
    own = [name for name, key in KEYS.items() if key.section not in others]
    assert all(f"  --{name} " in done.out for name in own) and "--no-python" not in done.out
    assert stoker("train", "--help").code == 0 and stoker("train").code == 64


def test_a_run_that_goes_on_is_the_same_with_other_ranks_and_other_words_but_not_with_another_rate() -> None:
    from stoker.control.plan.request import Request
    from stoker.control.plan.run_dir import config_hash
    from stoker.training.config.resolve import lasting

    def of(ranks: str, *argv: str) -> str:
        found = config("--preset", "small", *argv)
        return config_hash(
            Request(
                RunOptions(nproc_per_node=ranks),
                "recipe",
                tuple(flags(found)),
                frozenset(),
                tuple(flags(lasting(found))),
            )
        )

    assert of("2") == of("3", "--log_every", "7", "--keep", "5", "--strategy", "fsdp", "--resume", "never")
    assert of("2") != of("2", "--learning_rate", "1e-5") and of("2") != of("2", "--max-steps", "9")
    plain = [config_hash(Request(RunOptions(nproc_per_node=ranks), "train.py", (), frozenset())) for ranks in "23"]
    assert plain[0] != plain[1], "a script that is not ours may not go on with other ranks"


def test_the_latest_run_is_the_one_that_was_latest_when_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new run is the latest one before its ranks look."""
    from stoker.training.config.resolve import pinned, pinned_words

    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "1-base" / "hf").mkdir(parents=True)
    (tmp_path / "runs" / "latest").symlink_to("1-base")
    found = pinned(
        config(
            "--model.load",
            "runs/latest/hf",
            "--data",
            "runs/latest/text.txt",
            "--data",
            "latest/other.txt",
            "--resume",
            str(tmp_path / "runs/latest"),
        )
    )
    assert (found.model.load, found.data.path) == ("runs/1-base/hf", ("runs/1-base/text.txt", "latest/other.txt"))
    assert found.checkpoint.resume == str(tmp_path / "runs" / "1-base")
    words = ["train", "sft", "--model.load=runs/latest/hf", "--data", "runs/latest/text.txt", "--max-steps", "3"]
    pinned_command = "train sft --model.load=runs/1-base/hf --data runs/1-base/text.txt --max-steps 3"
    assert " ".join(pinned_words(words)) == pinned_command


def test_loaded_weights_bring_their_own_tokenizer_or_none_is_made_up(stoker: Stoker) -> None:
    (stoker.cwd / "weights").mkdir()
    stoker.script("text.txt", "some words " * 500)
    done = stoker("train", "pretrain", "--data", "text.txt", "--model.load", "weights", "--dry-run", "--no-preflight")
    assert (
        done.code == 66
        and "model.load weights has no tokenizer.json: name the tokenizer it was trained with" in done.err
    )
    stoker.script("weights/tokenizer.json", "{}")
    stoker.script("weights/config.json", json.dumps(LLAMA))
    done = stoker("train", "pretrain", "--data", "text.txt", "--model.load", "weights", "--dry-run", "--no-preflight")
    assert (
        done.code == 0 and "the tokenizer is that of model.load: weights" in done.err and "path: weights" in done.out
    ), done.err


def model_of_128_positions(stoker: Stoker) -> None:
    (stoker.cwd / "weights").mkdir()
    bytes_tokenizer().save(str(stoker.cwd / "weights"))
    stoker.script("weights/config.json", json.dumps({**LLAMA, "max_position_embeddings": 128}))
    turns = [{"role": "user", "content": "how many boats?"}, {"role": "assistant", "content": "seven boats"}]
    stoker.script("chats.jsonl", (json.dumps({"messages": turns}) + "\n") * 200)
    stoker.script("prompts.jsonl", (json.dumps({"prompt": "how many boats?", "answer": "seven"}) + "\n") * 200)


OF_STAGE = {"sft": ("--data", "chats.jsonl"), "grpo": ("--grpo.prompts", "prompts.jsonl")}


@pytest.mark.parametrize("stage", OF_STAGE)
def test_rows_are_no_longer_than_what_a_loaded_model_was_trained_for(stoker: Stoker, stage: str) -> None:
    model_of_128_positions(stoker)
    words = ("train", stage, "--model.load", "weights", *OF_STAGE[stage], "--dry-run", "--no-preflight")
    done = stoker(*words)
    assert done.code == 0 and "  context_length: 128\n" in done.out and "--data.context_length 128" in done.out, (
        done.err
    )
    assert "warning" not in done.err and "the most the model was trained for; --context-length" in done.err
    assert stage != "grpo" or "  new_tokens: 64\n" in done.out, "a prompt needs a place, too"
    asked = stoker(*words, "--context-length", "256")  # the preset's own: the ranks must be told all the same
    assert asked.code == 0 and "--data.context_length 256" in asked.out, asked.err
    assert asked.err.count("warning: data.context_length 256 is more than the 128 tokens that weights was trained") == 1


@pytest.mark.parametrize(("stage", "key"), [("dpo", "dpo.pairs"), ("reward", "reward.pairs"), ("grpo", "grpo.prompts")])
def test_data_names_what_the_stage_learns_from(stoker: Stoker, stage: str, key: str) -> None:
    model_of_128_positions(stoker)
    stoker.script("rows.jsonl", '{"prompt": "a", "chosen": "b", "rejected": "c", "answer": "b"}\n' * 20)
    words = ("train", stage, "--model.load", "weights", "--data", "rows.jsonl", "--dry-run", "--no-preflight")
    done = stoker(*words)
    assert done.code == 0 and f"--data rows.jsonl is used as --{key}" in done.err, done.err
    assert f" --{key} rows.jsonl " in done.out and "--data.path" not in done.out
    both = stoker(*words, "--data", "rows.jsonl", "other.jsonl")
    assert both.code == 64 and f"give --{key} rows.jsonl" in both.err, "two files are not one"


def test_a_dry_run_shows_no_shape_of_the_preset_where_a_model_is_loaded(stoker: Stoker) -> None:
    model_of_128_positions(stoker)
    done = stoker("train", "sft", "--model.load", "weights", *OF_STAGE["sft"], "--dry-run", "--no-preflight")
    shown = done.out[done.out.index("preset: small") :]
    assert "load: weights" in shown and "2 layers of width 64, 1,024 tokens" in shown, shown
    for name in ("depth", "layers", "dim", "heads", "ff", "vocab_size"):
        assert f"  {name}: " not in shown, shown
    stoker.script("again.yaml", shown)
    again = stoker("train", "sft", "--config", "again.yaml", "--dry-run", "--no-preflight")
    assert again.code == 0 and again.out[again.out.index("preset: small") :] == shown, again.err


def test_tokens_before_the_data_is_prepared_are_about_and_counted_by_the_tokenizer(stoker: Stoker) -> None:
    model_of_128_positions(stoker)
    words = ("train", "sft", "--model.load", "weights", *OF_STAGE["sft"], "--data.validation", "0")
    small = stoker(*words, "--dry-run", "--no-preflight").err
    (shown,) = json.loads(stoker("data", "show", "chats.jsonl", "--tokenizer", "weights", "--json").out)["files"]
    (tokens,) = re.findall(r"about 200 conversations, about ([\d,]+) tokens in about [\d,]+ rows", small)
    assert int(tokens.replace(",", "")) == pytest.approx(shown["tokens"], rel=0.05), (small, shown)
    assert "(the tokenizer counted all 200 rows)" in small
    chats = stoker.cwd / "chats.jsonl"
    chats.write_text(chats.read_text() * 200)
    large = stoker(*words, "--dry-run", "--no-preflight").err
    assert "rows (a guess from the size of the files)" in large, large


def test_an_estimate_of_a_dry_run_has_no_more_than_two_digits(stoker: Stoker) -> None:
    stoker.script("book.txt", "It was a dark night, and the rain fell in torrents. " * 4000)
    words = ("train", "pretrain", "--data", "book.txt", "--dry-run", "--no-preflight")
    guessed = stoker(*words).err
    (length,) = (line for line in guessed.splitlines() if line.startswith("  length"))
    steps, tokens = re.findall(r"about ([\d,]+) steps, \S+ passes over about ([\d,]+) tokens", length)[0]
    assert all(len(count.replace(",", "").rstrip("0")) <= 2 for count in (steps, tokens)), length
    counted = stoker(*words, "--tokenizer.path", "bytes", "--max-steps", "1234").err
    assert "(the tokenizer counted the whole text)" in counted and " 1,234 steps, " in counted, counted
    assert "about 1,234" not in counted, "a setting is no estimate"


def test_wandb_without_a_login_is_refused_before_anything_starts(stoker: Stoker) -> None:
    """Every state in which the real library logs in, or needs no login, is let through."""
    (stoker.cwd / "wandb").mkdir()
    stoker.script("wandb/__init__.py", "raise SystemExit('nothing imports it before the ranks')\n")
    stoker.script("book.txt", "a line\n" * 2000)
    home = stoker.cwd / "home"
    (home / ".config" / "wandb").mkdir(parents=True)
    words = ("train", "pretrain", "--debug", "--data", "book.txt", "--log-to", "wandb")
    clean = {"HOME": str(home), "XDG_CACHE_HOME": str(home)}
    for variables, options in (
        ({}, ()),
        ({"WANDB_MODE": "online"}, ()),
        ({"WANDB_BASE_URL": "https://wandb.example.org"}, ()),
    ):
        done = stoker(*words, *options, env={**clean, **variables})
        assert done.code == 77 and done.err.count("\n") == 1, done.err
        assert "wandb login" in done.err and "WANDB_MODE=offline" in done.err and "wandb.py" not in done.err
        assert ("--host https://wandb.example.org" in done.err) == ("WANDB_BASE_URL" in variables)
        assert not (stoker.cwd / "runs").exists()
    for variables, options in (
        ({"WANDB_MODE": "offline"}, ()),
        ({"WANDB_MODE": "disabled"}, ()),
        ({"WANDB_API_KEY": "0" * 40}, ()),
        ({}, ("--env", f"WANDB_API_KEY={'0' * 40}")),
    ):
        assert stoker(*words, *options, "--dry-run", env={**clean, **variables}).code == 0
    netrc = home / ".netrc"
    for machine, code in (("huggingface.co", 77), ("api.wandb.ai", 0)):
        netrc.write_text(f"machine {machine}\n  login user\n  password {'0' * 40}\n")
        netrc.chmod(0o600)
        assert stoker(*words, "--dry-run", env=clean).code == code
    netrc.unlink()
    (home / ".config" / "wandb" / "settings").write_text("[default]\nmode = offline\n")
    assert stoker(*words, "--dry-run", env=clean).code == 0


# As the library does: settings of the working directory count, and what is passed to init() comes before all of them.
WANDB = """import os, pathlib
calls = []
def init(**given):
    settings = [name for name in ("wandb", ".wandb") if (pathlib.Path.cwd() / name / "settings").exists()]
    calls.append((given["project"], given["name"], os.environ.get("WANDB_DIR"), settings))
log = finish = print
"""


@pytest.mark.parametrize("name", ["wandb", ".wandb"])
def test_wandb_gets_the_users_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from stoker.training.loop.say import open_loggers

    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    for variable in ("WANDB_DIR", "WANDB_PROJECT", "WANDB_NAME", "WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.setenv(variable, "")
    monkeypatch.setenv("HOME", str(tmp_path))
    project, run = tmp_path / "project", tmp_path / "runs" / "exp"
    run.mkdir(parents=True)
    project.mkdir()
    monkeypatch.chdir(project)
    monkeypatch.setenv("WANDB_MODE", "offline")
    open_loggers("wandb", str(run), {}, print)
    monkeypatch.delenv("WANDB_MODE")
    (project / name).mkdir()
    (project / name / "settings").write_text("[default]\nproject = theirs\nmode = offline\n")
    monkeypatch.setenv("WANDB_DIR", "logs")
    open_loggers("wandb", str(run), {}, print)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("WANDB_NAME", "first try")
    open_loggers("wandb", str(run), {}, print)
    import wandb

    assert wandb.calls == [
        ("stoker", "exp", str(run), []),
        ("theirs", "exp", "logs", [name]),
        ("mine", "first try", "logs", [name]),
    ]
    monkeypatch.delitem(sys.modules, "wandb")
