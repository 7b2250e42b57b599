"""SFT through the real command: packed chats, loss on answers only, the same curve whatever the number of ranks."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from conftest import Stoker

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
            turns += [{"role": "user", "content": f"Say {word}."}, {"role": "assistant", "content": (word + " ") * draw.randint(1, 4)}]
        rows.append(json.dumps({"messages": turns}))
    return "\n".join(rows)


def test_one_two_and_three_ranks_give_the_same_sft_curve(stoker: Stoker, tmp_path: Path) -> None:
    words = bytes_tokenizer()
    words.save(str(tmp_path / "tokenizer"))
    model = Decoder(SMALL, 128)
    model.start(3)
    hf.save(model, str(tmp_path / "begin"), say=lambda line: None, tokenizer_folder=str(tmp_path / "tokenizer"))
    (tmp_path / "chats.jsonl").write_text(chats(240, 0))
    (tmp_path / "other.jsonl").write_text(chats(40, 1))
    curves, held_out = [], []
    for ranks in (1, 2, 3):
        done = stoker.torch(
            "train", "sft", "--nproc-per-node", str(ranks), "--name", f"r{ranks}", "--runs-dir", str(tmp_path / "runs"), "--preset", "small",
            "--model.load", str(tmp_path / "begin"), "--data", str(tmp_path / "chats.jsonl"), "--data.validation", str(tmp_path / "other.jsonl"),
            "--context_length", "128", "--batch.tokens", "640", "--batch.micro", "2", "--max-steps", "20", "--learning-rate", "3e-3", "--log_every", "1",
            "--parallel.device", "cpu", "--eval_every", "0",
        )  # fmt: skip
        assert done.code == 0, done.out + done.err
        (run,) = (tmp_path / "runs").glob(f"*-r{ranks}")
        curves.append([json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines() if "val_loss" not in line])
        held_out.append(json.loads((run / "result.json").read_text())["metrics"]["val_loss"])
    assert len(curves[0]) == 20 and curves[0][-1] < 0.8 * curves[0][0]
    assert curves[1] == pytest.approx(curves[0], rel=1e-4) and curves[2] == pytest.approx(curves[0], rel=1e-4)
    assert held_out[1:] == pytest.approx([held_out[0]] * 2, rel=1e-4)
