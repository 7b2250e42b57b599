"""SFT through the real command: packed chats, loss on answers only, the same curve whatever the number of ranks."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import signal
from pathlib import Path

import pytest

from conftest import Done, Stoker, at_length, wait_for
from forked_ranks import program, server
from forked_recipes import trained

pytest.importorskip("torch", reason="torch is not installed")

from stoker.training.model import hf
from stoker.training.model.config import ModelConfig
from stoker.training.model.decoder import Decoder
from stoker.training.tokenizer.tokenizer import bytes_tokenizer

SMALL = ModelConfig(layers=2, dim=32, heads=2, kv_heads=2, head_dim=16, ff=64, vocab_size=272)


def chats(count: int, seed: int) -> str:
    """Of unlike lengths, some with two answers: what a rank gets of a step differs in its number of counted tokens."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        turns = []
        for _ in range(draw.choice((1, 1, 2))):
            word = "".join(draw.choice("abcdef") for _ in range(draw.randint(2, 9)))
            turns += [
                {"role": "user", "content": f"Say {word}."},
                {"role": "assistant", "content": (word + " ") * draw.randint(1, 4)},
            ]
        rows.append(json.dumps({"messages": turns}))
    return "\n".join(rows)


@pytest.fixture
def begin(tmp_path: Path) -> Path:
    """A model to begin with."""
    bytes_tokenizer().save(str(tmp_path / "tokenizer"))
    model = Decoder(SMALL, 128)
    model.start(3)
    hf.save(model, str(tmp_path / "begin"), say=lambda line: None, tokenizer_folder=str(tmp_path / "tokenizer"))
    return tmp_path / "begin"


@at_length
def test_60_chats_are_passed_over_three_times_and_that_is_printed_before_the_start(
    stoker: Stoker, tmp_path: Path, begin: Path
) -> None:
    (tmp_path / "chats.jsonl").write_text(chats(60, 0))
    words = (
        "--model.load",
        str(begin),
        "--data",
        str(tmp_path / "chats.jsonl"),
        "--data.validation",
        "0",
        "--parallel.device",
        "cpu",
    )
    dry = stoker("train", "sft", *words, "--dry-run", "--no-preflight")
    done = stoker.torch(
        "train", "sft", *words, "--runs-dir", str(tmp_path / "runs"), "--name", "plain", "--no-preflight"
    )
    assert dry.code == done.code == 0, dry.err + done.out + done.err
    for shown in (dry.err, done.err):
        assert "3 passes over your 60 conversations" in shown and "sft's default; --epochs or --max-steps" in shown, (
            shown
        )
    (run,) = (tmp_path / "runs").glob("*-plain")
    (steps,) = re.findall(r"length +([\d,]+) steps", done.err)
    result = json.loads((run / "result.json").read_text())["metrics"]
    assert result["steps"] == int(steps) and 20 <= result["steps"] <= 120 and "passes over" not in done.out
    settings = (run / "config.yaml").read_text()
    (rate,) = re.findall(r"learning rate +([\d.e-]+), cosine", done.err)
    assert float(rate) == pytest.approx(2e-5 * (1e9 / 25_000) ** 0.25, rel=0.1)  # the model has some 25,000 parameters
    assert (
        f"  learning_rate: {float(rate)!r}\n" in settings
        and "epochs: 3.0\n" in settings
        and "max_steps: 0\n" in settings
    )
    # The recipe by itself, as torchrun starts it: rank 0 derives the same and prints it.
    recipe = ("-m", "stoker.training.recipes.sft", *words, "--train.max_steps", "900")
    alone = stoker.torch("run", "--no-preflight", "--nproc-per-node", "2", "--stop-after-steps", "2", *recipe)
    shown = alone.out + alone.err
    assert shown.count("passes over your 60 conversations  you set it") == 1 and shown.count("warning: ") == 1, shown


# One and three ranks as torchrun would start them, forked from a process that has torch already; two under the launcher.
FORKS = program("""
import torch, torch._dynamo  # DDP imports the second when it is made
from stoker.training.recipes import sft, stage

def work(job, rank):
    return stage.run(sft.main, job["words"])
""")


def test_one_two_and_three_ranks_give_the_same_sft_curve(tmp_path: Path, begin: Path) -> None:
    (tmp_path / "chats.jsonl").write_text(chats(240, 0))
    (tmp_path / "other.jsonl").write_text(chats(40, 1))
    given = [
        "--preset", "small", "--model.load", str(begin), "--data", str(tmp_path / "chats.jsonl"), "--data.validation", str(tmp_path / "other.jsonl"),
        "--context_length", "128", "--batch.tokens", "640", "--batch.micro", "2", "--max-steps", "20", "--learning-rate", "3e-3", "--log_every", "1",
        "--parallel.device", "cpu", "--eval_every", "0",
    ]  # fmt: skip
    runs = {}
    with server(FORKS) as forked:
        for ranks in (1, 2, 3):
            folder = tmp_path / f"forked-{ranks}"
            forked.begin(ranks, folder, words=given)
            assert forked.codes() == [0] * ranks, (folder / "rank-0.log").read_text()
            (runs[ranks],) = (folder / "runs").glob("torchrun-*")
    curves, held_out = [], []
    for ranks in (1, 2, 3):
        lines = [json.loads(line) for line in (runs[ranks] / "metrics.jsonl").read_text().splitlines()]
        curves.append([line["loss"] for line in lines if "val_loss" not in line])
        held_out.append(json.loads((runs[ranks] / "result.json").read_text())["metrics"]["val_loss"])
    assert len(curves[0]) == 20 and curves[0][-1] < 0.8 * curves[0][0]
    assert curves[1] == pytest.approx(curves[0], rel=1e-4) and curves[2] == pytest.approx(curves[0], rel=1e-4)
    assert held_out[1:] == pytest.approx([held_out[0]] * 2, rel=1e-4)


@at_length
def test_weighted_sources_resume_where_they_were(stoker: Stoker, tmp_path: Path, begin: Path) -> None:
    """Two formats, one of them packed; killed after some steps and started again, by two ranks instead of one."""
    rows = [{"instruction": f"Say {number}.", "output": f"{number} " * 4} for number in range(40)]
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(json.dumps(rows).encode()))
    (tmp_path / "a.jsonl").write_text(chats(120, 0))
    words = [
        "--model.load", str(begin), "--data", str(tmp_path / "a.jsonl"), "--data", str(tmp_path / "b.json.gz"),
        "--data.mixture", "1", "--data.mixture", "2", "--data.validation", "0", "--parallel.device", "cpu",
        "--preset", "small", "--context_length", "128", "--batch.tokens", "640", "--batch.micro", "2", "--max-steps", "12",
        "--learning-rate", "3e-3", "--log_every", "1", "--eval_every", "0", "--log_samples", "true", "--no-preflight",
    ]  # fmt: skip

    def run_dir_of(done: Done, name: str) -> Path:
        assert done.code == 0, done.out + done.err
        (folder,) = (stoker.cwd / "runs").glob(f"*-{name}")
        return folder

    def run_and_kill(name: str) -> None:
        env = {"OMP_NUM_THREADS": "1"}
        job = stoker.start("train", "sft", *words, "--name", name, "--checkpoint.every_steps", "1", env=env)
        pattern = f"*-{name}/checkpoints/step-*[0-9]/manifest.json"  # not one that is still being written: *.tmp
        saved = wait_for(lambda: list((stoker.cwd / "runs").glob(pattern)) or None, 90)
        up = [event["pid"] for event in stoker.result().events if event["event"] == "rank-up"]
        for pid in (job.pid, *up):
            os.kill(pid, signal.SIGKILL)
        output, _ = job.communicate(timeout=60)
        assert saved, output

    def learned(folder: Path) -> dict[int, list[int]]:
        """The samples of each step, those of all ranks together."""
        lines = [json.loads(line) for path in folder.glob("samples-rank-*") for line in path.read_text().splitlines()]
        last = {step: max(line["from"] for line in lines if line["step"] == step) for step in range(12)}
        return {
            step: sorted(
                number for line in lines if (line["step"], line["from"]) == (step, last[step]) for number in line["ids"]
            )
            for step in range(12)
        }

    whole = run_dir_of(trained(stoker, ["train", "sft", "--name", "whole", *words[:-1]]), "whole")
    run_and_kill("parts")
    more = ("--name", "parts", "--nproc-per-node", "2", "--checkpoint.every_steps", "1")
    done = stoker.torch("train", "sft", *words, *more)
    assert "data format: messages (messages of role and content) in" in done.err and "alpaca" in done.err
    assert "data format: " not in done.out  # once: the ranks don't repeat it
    parts = run_dir_of(done, "parts")
    assert (parts / "samples-rank-1.jsonl").exists(), "the second attempt had two ranks"
    assert learned(parts) == learned(whole)
