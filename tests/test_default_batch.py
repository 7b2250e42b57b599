"""With nothing but defaults a run takes the same steps and has the same loss curve on any number of ranks."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import at_length_but, wait_for
from forked_ranks import Server, program, server

torch = pytest.importorskip("torch", reason="torch is not installed")

from stoker.training.config.amount import Amount  # noqa: E402
from stoker.training.config.derived import Situation  # noqa: E402
from stoker.training.config.flags import parse  # noqa: E402
from stoker.training.config.keys import values_of  # noqa: E402
from stoker.training.config.layers import gather  # noqa: E402
from stoker.training.config.presets import PRESETS  # noqa: E402
from stoker.training.config.resolve import settle  # noqa: E402
from stoker.training.model import hf  # noqa: E402
from stoker.training.model.config import ModelConfig  # noqa: E402
from stoker.training.model.decoder import Decoder  # noqa: E402
from stoker.training.stages.registry import STAGES  # noqa: E402
from stoker.training.stages.situation import with_defaults  # noqa: E402
from stoker.training.tokenizer.tokenizer import bytes_tokenizer  # noqa: E402

MODEL = ModelConfig(layers=1, dim=32, heads=2, kv_heads=2, head_dim=16, ff=64, vocab_size=272)
CONTEXT = 96
LEARNING = [name for name, stage in STAGES.items() if stage.learning is not None]
FORKS = program("""
from importlib import import_module
import torch, torch._dynamo  # the first optimizer imports the second
from stoker.training.recipes import dpo, grpo, midtrain, pretrain, reward, sft, stage

def work(job, rank):
    return stage.run(import_module("stoker.training.recipes." + job["stage"]).main, job["words"])
""")


@pytest.mark.parametrize("stage", LEARNING)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("samples", [1, 40, 3_000, 10**6])
@pytest.mark.parametrize("lora", [(), ("--lora",)], ids=["full", "lora"])
def test_no_default_depends_on_the_number_of_ranks(
    stage: str, preset: str, samples: int, lora: tuple[str, ...]
) -> None:
    words = ["--preset", preset, *lora, *(("--model.load", "hf") if stage != "pretrain" or lora else ())]
    resolved = settle(gather(parse(words), {}), True, STAGES[stage].defaults)
    amount = Amount(samples, 5 * samples, "conversations")
    derived = [
        values_of(with_defaults(stage, resolved.config, resolved.given, Situation(MODEL, amount, ranks), False)[0])
        for ranks in (1, 2, 3, 8, 100, None)
    ]
    assert all(values == derived[0] for values in derived)
    assert derived[0]["batch.tokens"] >= derived[0]["data.context_length"], "not a number for each rank"


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("given")
    bytes_tokenizer().save(str(folder / "tokenizer"))
    model = Decoder(MODEL, CONTEXT)
    model.start(3)
    hf.save(model, str(folder / "begin"), say=lambda line: None, tokenizer_folder=str(folder / "tokenizer"))
    draw = random.Random(1)
    words = ["".join(draw.choice("abcdef") for _ in range(draw.randint(2, 6))) for _ in range(120)]
    chats = [
        {"messages": [{"role": "user", "content": f"Say {word}."}, {"role": "assistant", "content": word}]}
        for word in words
    ]
    pairs = [{"prompt": f"Say {word}.", "chosen": word, "rejected": word[::-1] + "!"} for word in words]
    prompts = [{"prompt": f"{number}", "answer": str(number % 10)} for number in range(10, 40)]
    for name, rows in (("chats", chats), ("pairs", pairs), ("held-out", pairs[:20]), ("prompts", prompts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "book.txt").write_text("It was a dark night, and the rain fell in torrents. " * 120)
    return folder


@pytest.fixture(scope="module")
def ranks() -> Iterator[Server]:
    with server(FORKS) as forked:
        yield forked


def words_of(stage: str, given: Path) -> list[str]:
    load = ["--model.load", str(given / "begin")]
    own = {
        "pretrain": [
            "--data", str(given / "book.txt"), "--tokenizer.path", "bytes", "--model.layers", "1", "--model.dim", "32",
            "--model.heads", "2",
        ],
        "midtrain": [*load, "--data", str(given / "chats.jsonl")],
        "sft": [*load, "--data", str(given / "chats.jsonl")],
        "reward": [*load, "--reward.pairs", str(given / "pairs.jsonl"), "--reward.held_out", str(given / "held-out.jsonl")],
        "dpo": [*load, "--dpo.pairs", str(given / "pairs.jsonl"), "--dpo.held_out", str(given / "held-out.jsonl")],
        "grpo": [
            *load, "--grpo.prompts", str(given / "prompts.jsonl"), "--generate.new_tokens", "4", "--grpo.group", "4",
            "--grpo.reward", "length:3", "--max-steps", "4",
        ],
    }[stage]  # fmt: skip
    return [
        "--preset", "small", *own, "--context_length", str(CONTEXT), "--log_every", "1", "--parallel.device", "cpu",
        "--data.cache", str(given / "cache"),
    ]  # fmt: skip


class Curve:
    """What a run's metrics.jsonl and log say."""

    def __init__(self, folder: Path) -> None:
        (run,) = (folder / "runs").glob("torchrun-*")
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        steps = {line["step"]: line for line in lines if "loss" in line and "val_loss" not in line}
        self.losses = [steps[step]["loss"] for step in sorted(steps)]
        self.tokens = [steps[step]["tokens"] for step in sorted(steps)]
        self.said = (folder / "rank-0.log").read_text()


def trained(forked: Server, folder: Path, stage: str, count: int, words: list[str]) -> Curve:
    forked.begin(count, folder, stage=stage, words=words)
    assert forked.codes() == [0] * count, (folder / "rank-0.log").read_text()
    return Curve(folder)


@pytest.mark.parametrize("stage", ["pretrain", "midtrain", "sft", "reward", "dpo", "grpo"])
def test_one_two_and_three_ranks_have_one_curve_with_defaults(
    ranks: Server, given: Path, tmp_path: Path, stage: str
) -> None:
    """The small data makes small batches: they are no multiple of the ranks, or smaller than their number."""
    one, *others = (trained(ranks, tmp_path / f"{n}", stage, n, words_of(stage, given)) for n in (1, 2, 3))
    assert len(one.losses) >= 4 and max(one.losses) > min(one.losses)
    for other in others:
        assert other.tokens == one.tokens, "the same steps, of as many tokens each"
        assert other.losses == pytest.approx(one.losses, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("stage", at_length_but(["sft"], ["pretrain", "sft", "reward", "dpo"]))
def test_ranks_without_a_sample_change_nothing_and_are_reported(
    ranks: Server, given: Path, tmp_path: Path, stage: str, strategy: str
) -> None:
    words = [*words_of(stage, given), "--batch.tokens", str(2 * CONTEXT), "--max-steps", "5"]
    one = trained(ranks, tmp_path / "1", stage, 1, words)
    four = trained(ranks, tmp_path / "4", stage, 4, [*words, "--strategy", strategy])
    assert four.losses == pytest.approx(one.losses, rel=1e-4, abs=1e-6) and four.tokens == one.tokens
    assert "2 of 4 ranks have nothing to compute" in four.said and "nothing to compute" not in one.said


def test_a_run_with_defaults_resumes_on_more_and_on_fewer_ranks(ranks: Server, given: Path, tmp_path: Path) -> None:
    kept = str(tmp_path / "kept")
    words = [*words_of("sft", given), "--checkpoint.folder", kept, "--checkpoint.every_steps", "1"]
    whole = trained(ranks, tmp_path / "whole", "sft", 1, words_of("sft", given))
    losses: list[float] = []
    for number, (count, stop_after) in enumerate(((2, 4), (3, 9), (1, None))):
        folder = tmp_path / f"{number}"
        pids = ranks.begin(count, folder, stage="sft", words=words)
        if stop_after is not None:
            log, mark = folder / "rank-0.log", f"Step [{stop_after}/"
            reached = wait_for(lambda log=log, mark=mark: (log.exists() and mark in log.read_text()) or None, 90)
            for pid in pids:
                os.kill(pid, signal.SIGTERM)
            assert reached, log.read_text()
        assert ranks.codes() == [0] * count, (folder / "rank-0.log").read_text()
        part = Curve(folder)
        assert (number > 0) == ("resumes at step" in part.said)
        losses += part.losses
    assert losses == pytest.approx(whole.losses, rel=1e-4, abs=1e-6)
