"""Watching a fine-tune: held-out prompts that are answered, validations along the way, an early stop with the best weights."""

from __future__ import annotations

import json
import os
import random
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch
from safetensors.torch import load_file

from conftest import Stoker, at_length, at_length_but
from forked_recipes import trained
from stoker.training.loop.samples import Example, answers, chosen, from_chats
from stoker.training.model import hf
from stoker.training.model.config import ModelConfig
from stoker.training.model.decoder import Decoder
from stoker.training.serve.batch import BatchEngine
from stoker.training.tokenizer.tokenizer import bytes_tokenizer

SHAPE = ModelConfig(layers=2, dim=64, heads=4, kv_heads=2, head_dim=16, ff=128, vocab_size=320, init_std=0.2)
CONTEXT = 256


def base(folder: Path) -> Path:
    bytes_tokenizer().save(str(folder / "tokenizer"))
    model = Decoder(SHAPE, CONTEXT)
    model.start(3)
    told = {"say": lambda line: None, "tokenizer_folder": str(folder / "tokenizer")}
    hf.save(model, str(folder / "base"), **told)  # type: ignore[arg-type]
    return folder / "base"


def chats(path: Path, count: int = 400, random_answers: bool = False) -> Path:
    draw, made = random.Random(0), []
    for number in range(count):
        said = "".join(draw.choice("abcdefgh") for _ in range(12)) if random_answers else f"it is {number % 7}"
        turns = [("user", f"say {number % 7}"), ("assistant", said)]
        made.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path


def words(name: str, load: Path, data: Path, *more: str) -> list[str]:
    return [
        "train", "sft", "--name", name, "--preset", "small", "--model.load", str(load), "--data", str(data),
        "--data.validation", "0.05", "--context_length", str(CONTEXT), "--batch.tokens", "1024", "--batch.micro", "4",
        "--log_every", "1", "--parallel.device", "cpu", *more,
    ]  # fmt: skip


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_are_those_of_the_engine() -> None:
    model = Decoder(SHAPE, CONTEXT)
    model.start(5)
    prompts = [[1, 2, 3], [200, 7], [9] * 40]
    ours = answers(model, prompts, [12], 300)
    engine = BatchEngine(model, rows=3, length=128, vocab=300).generate(
        prompts, new_tokens=64, stop={12}, temperature=0
    )
    assert ours == [row[:-1] if row[-1] == 12 else row for row in engine] and model.training


INTERRUPTED = """
import os, signal, sys
from stoker.training.loop import samples
from stoker.training.recipes import sft, stage

if sys.argv[1] == "samples":
    logits = samples._logits
    def interrupted(*given):
        os.kill(os.getpid(), signal.SIGINT)
        samples._logits = logits
        return logits(*given)
    samples._logits = interrupted
else:
    stage.situation = lambda *given: os.kill(os.getpid(), signal.SIGINT)
sys.exit(stage.run(sft.main, sys.argv[2:]))
"""


@pytest.mark.parametrize("when", at_length_but(["settings"], ["samples", "settings"]))
def test_a_stop_before_the_first_step_has_no_traceback(tmp_path: Path, when: str) -> None:
    given = words("x", base(tmp_path), chats(tmp_path / "chats.jsonl"))[4:]
    command = [sys.executable, "-c", INTERRUPTED, when, *given]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    if when == "settings":
        assert done.returncode == 130 and "stopped before the first step" in done.stdout, done
        return
    assert done.returncode == 0 and "stopped: 1 of " in done.stdout and "; saved " in done.stdout, done
    assert "Sample 1" not in done.stdout
    (line,) = re.findall("first step after .*", done.stdout)
    assert re.search(r"sample answers [\d.]+, first step [\d.]+$", line), line


def test_examples_are_prompts_and_first_answers_of_packed_rows() -> None:
    class Rows:
        def __len__(self) -> int:
            return 1

        def batch(self, ids: np.ndarray) -> Any:
            inputs = np.array([[1, 2, 3, 4, 5, 6, 7, 8, 0]])
            targets = np.array([[-100, 3, 4, -100, -100, 7, 8, 9, -100]])
            segments = np.array([[0, 0, 0, 0, 1, 1, 1, 1, 2]])
            return type("Batch", (), {"inputs": inputs, "targets": targets, "segments": segments})

    found = list(from_chats(Rows(), 3))  # type: ignore[arg-type]
    assert found == [Example((1, 2), (3, 4)), Example((5, 6), (7, 8, 9))]
    assert chosen(iter(found), 1, 66) == found[:1] and chosen(iter(found), 2, 65) == []


@at_length
def test_held_out_prompts_are_answered_before_during_and_after(stoker: Stoker, tmp_path: Path) -> None:
    load, data = base(tmp_path), chats(tmp_path / "chats.jsonl")
    done = stoker.torch(
        *words(
            "watched",
            load,
            data,
            "--lora",
            "--lora_rank",
            "8",
            "--max-steps",
            "60",
            "--learning-rate",
            "1e-2",
            "--eval-every",
            "6",
        )
    )
    assert done.code == 0, done.out + done.err
    (run,) = (stoker.cwd / "runs").glob("*-watched")
    path = run / "samples.jsonl"
    found = rows(path)
    steps = [line["step"] for line in rows(run / "metrics.jsonl") if "val_loss" in line]
    assert sorted({row["step"] for row in found}) == [0, *range(6, 61, 6)]
    assert [step + 1 for step in steps] == list(range(6, 61, 6))
    assert all(sum(row["step"] == step for row in found) == 3 for step in (0, 60))
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600 and stat.S_IMODE(os.stat(run).st_mode) == 0o700
    first, last = found[0], found[-3]
    assert first["prompt"] == last["prompt"] and "say" in first["prompt"] and first["wanted"].startswith("it is ")
    assert first["answer"] != last["answer"] and last["answer"].startswith("it is "), last
    assert "Sample 1 before the first step | " in done.out and "Sample 3 after step 60 | " in done.out
    for name, more in (("debug", ("--preset", "debug")), ("none", ("--samples", "0", "--max-steps", "2"))):
        done = trained(stoker, words(name, load, data, "--lora", *more))
        assert done.code == 0, done.out + done.err
        (run,) = (stoker.cwd / "runs").glob(f"*-{name}")
        assert not (run / "samples.jsonl").exists() and "Sample 1" not in done.out


def test_patience_stops_a_run_that_learns_by_heart_and_exports_its_best(stoker: Stoker, tmp_path: Path) -> None:
    load, data = base(tmp_path), chats(tmp_path / "chats.jsonl", 60, random_answers=True)
    more = ("--lora", "--lora_rank", "16", "--learning-rate", "2e-2", "--schedule", "constant", "--max-steps", "300")
    more += ("--eval_every", "5", "--patience", "3", "--data.validation", "0.2", "--checkpoint.keep", "1")
    done = trained(stoker, words("patient", load, data, *more))
    assert done.code == 0 and "train.patience: 3 validations without a loss below" in done.out, done.out + done.err
    (run,) = (stoker.cwd / "runs").glob("*-patient")
    losses = {line["step"] + 1: line["val_loss"] for line in rows(run / "metrics.jsonl") if "val_loss" in line}
    best = min(losses, key=lambda step: losses[step])
    assert max(losses) == best + 15 < 300, losses
    (kept,) = run.glob(f"checkpoints/step-{best:08d}")
    assert "back to the best checkpoint: " in done.out and f"step-{best:08d}, validation loss" in done.out, done.out
    exported = stoker.torch("export", str(kept), str(tmp_path / "out"))
    assert exported.code == 0, exported.err
    ours, theirs = (folder / "adapter_model.safetensors" for folder in (run / "hf", tmp_path / "out"))
    saved = load_file(theirs)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in load_file(ours).items()), "the best, not the last"
    assert json.loads((run / "result.json").read_text())["metrics"]["steps"] == best + 15
