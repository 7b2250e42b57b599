"""The reward model: its pairs, its loss, its head in a folder; and the recipe on one, two and three ranks."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import numpy as np
import torch
import torch.nn.functional as F

from conftest import Stoker
from forked_ranks import program, server
from stoker.contract.errors import Refusal
from stoker.contract.frozen import replace
from stoker.training.config.resolve import recipe_settings
from stoker.training.data.reader import IGNORED
from stoker.training.generate.exporting import export
from stoker.training.generate.finding import Found
from stoker.training.loop.learner import Beside
from stoker.training.model.attention import documents
from stoker.training.model.config import ModelConfig
from stoker.training.model.decoder import Decoder
from stoker.training.recipes.reward import calibration
from stoker.training.reward.model import RewardModel, learner, load, margins, open_reward, save, scores
from stoker.training.reward.pairs import PairRows, asked, read_pairs
from stoker.training.tokenizer.tokenizer import bytes_tokenizer

SMALL = ModelConfig(layers=2, dim=32, heads=4, kv_heads=2, head_dim=8, ff=48, vocab_size=320, init_std=0.2)


def rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """The better answer says yes."""
    draw = random.Random(seed)
    made = []
    for number in range(count):
        word = "".join(draw.choice("abcdef") for _ in range(draw.randint(2, 6)))
        made.append(
            {
                "prompt": f"is {word} {number % 7}?",
                "chosen": f"yes {word}",
                "rejected": f"no {word}",
                "kind": "right" if number % 2 else "form",
            }
        )
    return made


def numbered(made: list[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    return list(enumerate(made, 1))


def nothing(line: str) -> None:
    raise AssertionError(line)


def test_a_row_holds_whole_pairs_side_by_side_and_says_where_they_end() -> None:
    words = bytes_tokenizer()
    pairs = read_pairs(numbered(rows(20)), words, 160, "pairs", nothing)
    pair_rows = PairRows(pairs, 160, 0)
    batch = pair_rows.batch(np.arange(len(pair_rows), dtype=np.int64))
    seen = []
    assert batch.segments is not None
    for inputs, targets, segments in zip(batch.inputs, batch.targets, batch.segments, strict=True):
        for place in np.flatnonzero(targets != IGNORED).tolist():
            better, worse = segments[place], segments[targets[place]]
            seen.append((inputs[segments == better].tolist(), inputs[segments == worse].tolist()))
            assert (
                targets[place] == np.flatnonzero(segments == worse).max()
                and place == np.flatnonzero(segments == better).max()
            )
    assert seen == [(pair.better.tolist(), pair.worse.tolist()) for pair in pairs] and 1 < len(pair_rows) < 20
    assert pair_rows.digest() != PairRows(pairs[::-1], 160, 0).digest()


@pytest.mark.parametrize("likelihood", [True, False])
def test_the_loss_is_bradley_and_terrys_of_each_answer_alone(likelihood: bool) -> None:
    words = bytes_tokenizer()
    made = rows(7)
    pairs = read_pairs(numbered(made), words, 200, "pairs", nothing)
    pair_rows = PairRows(pairs, 200, 0)
    model = learner(likelihood).kind(SMALL, 200)
    assert isinstance(model, RewardModel) and hasattr(model, "trust") == likelihood
    model.start(1)
    with torch.no_grad():
        model.score.normal_(generator=torch.Generator().manual_seed(1))
        if likelihood:
            model.trust.fill_(0.3)
    batch = pair_rows.batch(np.arange(len(pair_rows), dtype=np.int64))
    inputs, targets, segments = (torch.from_numpy(one) for one in (batch.inputs, batch.targets, batch.segments))
    packed = documents(segments, torch.device("cpu"))
    got = model(inputs, targets, torch.tensor(0.5), packed)
    alone = scores(
        model,
        words,
        [(row["prompt"], row[side]) for row in made for side in ("chosen", "rejected")],
        torch.device("cpu"),
        micro=3,
    )
    want = sum(F.softplus(torch.tensor(alone[at + 1] - alone[at])) for at in range(0, len(alone), 2)) * 0.5
    torch.testing.assert_close(got, torch.as_tensor(want), rtol=1e-4, atol=1e-4)
    found = margins(model(inputs, None, None, packed), targets)[targets != IGNORED]
    torch.testing.assert_close(found, torch.tensor(alone[::2]) - torch.tensor(alone[1::2]), rtol=1e-3, atol=1e-3)
    if likelihood:  # by hand: the vector at the end, and the answer's tokens alone
        ids, begun = torch.tensor(pairs[0].better.tolist())[None], len(asked(words, made[0]["prompt"]))
        logp = (
            torch.log_softmax(F.linear(model.hidden(ids), model.head_weight)[0, :-1], -1)
            .gather(1, ids[0, 1:, None])[begun - 1 :]
            .sum()
        )
        torch.testing.assert_close(
            alone[0], (model.hidden(ids)[0, -1] @ model.score + 0.3 * logp).item(), rtol=1e-4, atol=1e-4
        )


def test_a_folder_brings_the_head_back_and_one_without_is_refused(tmp_path: Path) -> None:
    words = bytes_tokenizer()
    words.save(str(tmp_path / "tokenizer"))
    model = RewardModel(SMALL, 64)
    model.start(1)
    with torch.no_grad():
        model.score.fill_(0.25)
        model.trust.fill_(0.5)
    beside = Beside(str(tmp_path / "tokenizer"), False)
    save(model, str(tmp_path / "hf"), beside, lambda line: None, True)
    save(model, str(tmp_path / "hf"), beside, lambda line: None, True)  # over an earlier one
    c = recipe_settings(["--preset", "small", "--context_length", "64"], False, {}).config
    again = open_reward(str(tmp_path / "hf"), 64, c.compute, torch.device("cpu"))
    row = [("hello?", "yes")]
    assert scores(again, words, row, torch.device("cpu")) == scores(model, words, row, torch.device("cpu")) != [0.0]
    said: list[str] = []
    export(Found(str(tmp_path / "hf")), str(tmp_path / "out"), None, None, said.append)
    assert scores(
        open_reward(str(tmp_path / "out"), 64, c.compute, torch.device("cpu")), words, row, torch.device("cpu")
    ) == scores(model, words, row, torch.device("cpu"))
    assert any("score.safetensors" in line for line in said), "and transformers does not read it"
    (tmp_path / "hf" / "score.safetensors").unlink()
    with pytest.raises(Refusal, match="is not a reward model"):
        open_reward(str(tmp_path / "hf"), 64, c.compute, torch.device("cpu"))
    begun = RewardModel(SMALL, 64)
    begun.start(2)
    load(begun, str(tmp_path / "hf"), lambda line: None)  # a decoder's folder: the head stays
    assert not begun.score.any() and torch.equal(begun.embed.weight, model.embed.weight)


def test_calibration_counts_how_often_it_was_right_when_it_was_sure() -> None:
    found = calibration([3.0, 3.0, 3.0, -3.0, 0.01, -0.01])
    assert [one["count"] for one in found] == [2, 4]
    assert found[0]["observed"] == 0.5 and found[1]["observed"] == 0.75
    assert found[1]["low"] <= found[1]["predicted"] <= found[1]["high"]
    assert calibration([1000.0])[0]["predicted"] == 1.0
    assert calibration([0.0, 0.0])[0] | {"low": 0, "high": 0} == {
        "low": 0,
        "high": 0,
        "predicted": 0.5,
        "observed": 0.5,
        "count": 2,
    }


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "the same text"),
        ({"prompt": "a", "chosen": "b"}, "no rejected"),
        ({"prompt": "a", "chosen": "b", "rejected": 3}, "must be texts"),
        ({"prompt": [{"role": "robot", "content": "x"}], "chosen": "b", "rejected": "c"}, "the role 'robot'"),
        ({"prompt": "a" * 400, "chosen": "b", "rejected": "c"}, "more tokens than data.context_length"),
    ],
)
def test_rows_that_are_no_pairs_are_named_and_left_out_only_when_they_are_few(row: dict[str, Any], line: str) -> None:
    said: list[str] = []
    assert len(read_pairs(numbered([*rows(200), row]), bytes_tokenizer(), 256, "p.jsonl", said.append)) == 200
    assert "1 of 201" in said[0] and "row 201" in said[0] and line in said[0]
    if "data.context_length" in line:  # long ones are left out as long as half of them fit
        assert len(read_pairs(numbered([*rows(9), *[row] * 9]), bytes_tokenizer(), 256, "p.jsonl", said.append)) == 9
        assert "9 of 18 pairs are too long" in said[-1] and "needs data.context_length 8" in said[-1]
        with pytest.raises(Refusal, match="9 of 17 pairs are too long"):
            read_pairs(numbered([*rows(8), *[row] * 9]), bytes_tokenizer(), 256, "p.jsonl", said.append)
        return
    with pytest.raises(Refusal, match="2 of 42"):
        read_pairs(numbered([*rows(40), row, row]), bytes_tokenizer(), 256, "p.jsonl", said.append)


# One and three ranks as torchrun would start them, forked from a process that has torch already; two under the launcher.
FORKS = program("""
import torch, torch._dynamo  # DDP imports the second when it is made
from stoker.training.recipes import reward, stage

def work(job, rank):
    return stage.run(reward.main, job["words"])
""")


def test_one_two_and_three_ranks_learn_the_same_and_order_held_out_pairs(stoker: Stoker, tmp_path: Path) -> None:
    words = bytes_tokenizer()
    words.save(str(tmp_path / "tokenizer"))
    model = Decoder(SMALL, 128)
    model.start(3)
    from stoker.training.model import hf

    hf.save(model, str(tmp_path / "begin"), say=lambda line: None, tokenizer_folder=str(tmp_path / "tokenizer"))
    for name, some in (("pairs", rows(240)), ("other", rows(60, seed=9))):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in some))
    given = [
        "--preset", "small", "--model.load", str(tmp_path / "begin"), "--reward.pairs", str(tmp_path / "pairs.jsonl"),
        "--reward.held_out", str(tmp_path / "other.jsonl"), "--context_length", "128", "--batch.tokens", "1152", "--batch.micro", "2",
        "--schedule", "constant", "--warmup_steps", "1", "--learning-rate", "3e-3", "--log_every", "1", "--parallel.device", "cpu", "--eval_every", "0",
    ]  # fmt: skip
    runs, steps = {}, {1: 25, 2: 8, 3: 8}
    with server(FORKS) as forked:
        for ranks in (1, 3):
            forked.begin(ranks, tmp_path / f"forked-{ranks}", words=[*given, "--max-steps", str(steps[ranks])])
            assert forked.codes() == [0] * ranks, (tmp_path / f"forked-{ranks}" / "rank-0.log").read_text()
            (runs[ranks],) = (tmp_path / f"forked-{ranks}" / "runs").glob("torchrun-*")
    given += ["--nproc-per-node", "2", "--name", "r2", "--runs-dir", str(tmp_path / "runs")]
    done = stoker("train", "reward", *given, "--max-steps", str(steps[2]))
    assert done.code == 0, done.out + done.err
    (runs[2],) = (tmp_path / "runs").glob("*-r2")
    curves, results = [], []
    for ranks in (1, 2, 3):
        lines = [json.loads(line) for line in (runs[ranks] / "metrics.jsonl").read_text().splitlines()]
        curves.append([line["loss"] for line in lines if "val_loss" not in line])
        results.append(json.loads((runs[ranks] / "result.json").read_text()))
    assert [len(curve) for curve in curves] == [25, 8, 8]
    assert curves[1] == pytest.approx(curves[0][:8], rel=1e-4) and curves[2] == pytest.approx(curves[0][:8], rel=1e-4)
    told = results[0]["metrics"]
    assert (
        told["accuracy"] >= 0.95
        and told["total"] == 60
        and set(told["by_kind"]) == {"form", "right"}
        and told["low"] < told["accuracy"]
    )
    assert results[0]["model"] == "hf"


@pytest.mark.parametrize(("likelihood", "tied"), [("true", True), ("false", False)])
def test_a_trial_of_micro_batches_and_a_head_that_is_not_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, likelihood: str, tied: bool
) -> None:
    """On GPUs batch.micro auto tries random ids; targets are places in a row. With reward.likelihood off nothing reads an untied head."""
    from stoker.training.model import hf
    from stoker.training.recipes import build
    from stoker.training.recipes import reward as recipe

    bytes_tokenizer().save(str(tmp_path / "tokenizer"))
    model = Decoder(replace(SMALL, tied=tied), 128)
    model.start(3)
    hf.save(model, str(tmp_path / "begin"), say=lambda line: None, tokenizer_folder=str(tmp_path / "tokenizer"))
    (tmp_path / "pairs.jsonl").write_text("\n".join(json.dumps(row) for row in rows(60)))
    tried = []

    def largest(c: Any, model: Any, optimizer: Any, group: Any, voice: Any, *, packed: bool, **more: Any) -> int:
        build.random_micro_batch(c, model, group.device, 2, packed=packed)
        optimizer.zero()
        tried.append(model.config.vocab_size > c.data.context_length)
        return 2

    monkeypatch.setattr(build, "largest_micro", largest)
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "STOKER_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)
    code = recipe.main(
        [
            "--preset",
            "small",
            "--model.load",
            "begin",
            "--reward.pairs",
            "pairs.jsonl",
            "--reward.likelihood",
            likelihood,
            "--context_length",
            "128",
            "--batch.tokens",
            "512",
            "--batch.micro",
            "auto",
            "--max-steps",
            "2",
            "--parallel.device",
            "cpu",
            "--eval_every",
            "0",
        ]
    )
    assert code == 0 and tried == [True]


def test_rows_that_are_no_pairs_end_the_reading(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from stoker.training.reward.pairs import read_pairs
    from stoker.training.tokenizer.tokenizer import bytes_tokenizer

    read = []

    def rows() -> object:
        for number in range(1_000_000):
            read.append(number)
            yield number, {"x": 1}

    with pytest.raises(Refusal, match="not usable pairs"):
        read_pairs(rows(), bytes_tokenizer(), 128, "dpo.pairs x", lambda line: None)  # type: ignore[arg-type]
    assert len(read) <= 2000
