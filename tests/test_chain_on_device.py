"""The whole chain of `stoker speedrun`, every stage of it in small, and a server of one of its models: on a GPU where there is one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from conftest import Stoker, alone_on_the_card
from devices import ON_GPU
from stoker.training.model import hf
from stoker.training.model.config import ModelConfig
from stoker.training.model.decoder import Decoder
from stoker.training.tokenizer.tokenizer import bytes_tokenizer
from test_serve import CONTEXT
from test_serve_weights import Pushed

SETTINGS = (
    "world:size=0.05", "world:level=0", "tokenizer:tokenizer.vocab_size=768", "tokenizer:tokenizer.train_megabytes=1",
    "data.context_length=256", "batch.tokens=2048", "batch.micro=4", "train.max_steps=4", "train.log_every=1",
    "train.eval_tokens=2048", "pretrain:model.depth=0", "pretrain:model.layers=2", "pretrain:model.dim=128",
    "pretrain:model.heads=2", "pretrain:model.ff=256", "generate.new_tokens=16", "generate.rows=16",
    "evaluate:evaluate.most=6", "evaluate:evaluate.draws=1", "eval-base:evaluate.draws=0",
    "grpo:batch.tokens=0", "grpo:grpo.prompts_per_step=4", "grpo:grpo.group=4", "grpo:train.max_steps=2",
    "diversity:diversity.most=4", "diversity:diversity.answers=2", "density:density.clusters=4",
)  # fmt: skip
CHAIN_S = 600.0


@pytest.mark.gpu(seconds=120)
@pytest.mark.timeout(CHAIN_S)
def test_every_stage_of_the_chain_runs_and_the_report_has_its_numbers(stoker: Stoker) -> None:
    """GRPO asks a reward model, the second one with the weights that density gives the prompts."""
    words = [word for setting in SETTINGS for word in ("--set", setting)]
    if ON_GPU:
        del stoker.env["STOKER_MACHINE"]
        with alone_on_the_card():
            done = stoker("speedrun", "--preset", "gpu", "--nproc-per-node", "1", *words, timeout=CHAIN_S)
    else:
        done = stoker("speedrun", "--preset", "cpu", "--nproc-per-node", "1", *words, timeout=CHAIN_S)
    assert done.code == 0, done.out[-3000:] + done.err[-6000:]
    (folder,) = (stoker.cwd / "runs").glob("speedrun-*")
    chain = json.loads((folder / "chain.json").read_text())
    states = {entry["name"]: entry["status"] for entry in chain["stages"]}
    assert len(states) == 16 and set(states.values()) == {"done"}, states
    report = (folder / "report.md").read_text()
    assert all(name in report for name in ("reward", "grpo-density", "diversity"))
    assert (folder / "report.html").stat().st_size > 1000


@pytest.mark.gpu(seconds=25)
def test_a_server_answers_and_takes_new_weights(tmp_path: Path) -> None:
    bytes_tokenizer().save(str(tmp_path / "tokenizer"))
    shape = ModelConfig(
        layers=2, dim=128, heads=2, kv_heads=1, head_dim=64, ff=256, vocab_size=320, tied=False, init_std=0.3
    )
    for name, seed in (("base", 5), ("pushed/again", 5), ("pushed/other", 6)):
        model = Decoder(shape, CONTEXT)
        model.start(seed)
        (tmp_path / name).parent.mkdir(exist_ok=True)
        hf.save(model, str(tmp_path / name), say=lambda line: None, tokenizer_folder=str(tmp_path / "tokenizer"))
    flags = ("--name", "small", "--slots", "4", "--memory", "1024", "--weights-from", str(tmp_path / "pushed"))
    with Pushed(tmp_path / "base", *flags, CUDA_VISIBLE_DEVICES="0" if ON_GPU else "") as server:
        device = server.ask("/v1/weights")[1]["device"]
        assert device.startswith("cuda") == ON_GPU
        first, _ = server.answer()
        assert first == server.answer()[0]
        found = []
        for version, name in enumerate(("other", "again"), 1):
            status, reply = server.push(tmp_path / "pushed" / name, version=version)
            assert status == 200, reply
            tokens, weights = server.answer()
            assert weights["version"] == version
            found.append(tokens)
    assert found[0] != first and found[1] == first
