"""Every stage with every kind of adapter, and a resume of each, on a GPU where there is one and else on a CPU.

Several of these may run on one GPU at a time: the models are tiny, and no launcher locks the card.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from conftest import Stoker
from devices import DEVICE, ON_GPU, cases, train
from stoker.training.loop.learner import Beside
from stoker.training.model import adapters, hf
from stoker.training.model.config import ModelConfig
from stoker.training.model.decoder import Decoder
from stoker.training.reward.model import RewardModel
from stoker.training.reward.model import save as save_reward
from stoker.training.tokenizer.tokenizer import bytes_tokenizer

# Heads of 64, so that the fused blocks and the paged attention of a GPU take it.
SHAPE = ModelConfig(layers=2, dim=128, heads=2, kv_heads=1, head_dim=64, ff=256, vocab_size=320, tied=False)
CONTEXT, STEPS, SAVED = 128, 4, 2
ROLLOUTS = "grpo of rollouts"  # stage grpo with grpo.rollout
STAGES = ("midtrain", "sft", "reward", "dpo", "grpo", ROLLOUTS)
GAME = """
async def rollout(client, row, seed):
    chat = client.conversation(row["prompt"])
    await chat.sample(max_tokens=4)
    chat.add({"role": "user", "content": "again"})
    last = await chat.sample(max_tokens=4)
    return chat.rollout(float(last.token_ids[0] % 2), {"std": 1.0})  # reward_std is a metric of ours
"""
METHODS: dict[str, tuple[str, ...]] = {
    "full": (),
    "lora": ("--lora", "--lora-rank", "4"),
    "qlora": ("--qlora", "--lora-rank", "4"),
    "offload": ("--strategy", "fsdp", "--offload", "all"),
    "qlora, offload": ("--qlora", "--lora-rank", "4", "--strategy", "fsdp", "--offload", "all"),
}
COMBINATIONS = [
    ("pretrain", "full"),
    ("pretrain", "offload"),
    *((stage, method) for stage in STAGES for method in METHODS if "grpo" not in stage or "offload" not in method),
]  # GRPO refuses parallel.offload all
# By default on a CPU. Midtrain learns as sft does; rollouts with adapters differ from answers with adapters in nothing.
ON_CPU_TOO = [case for case in COMBINATIONS if case[0] not in ("midtrain", "dpo") and case != (ROLLOUTS, "qlora")]


def quiet(line: str) -> None:
    pass


def sentences(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    words = ["".join(draw.choice("abcdefgh") for _ in range(draw.randint(2, 5))) for _ in range(40)]
    return [" ".join(draw.choice(words) for _ in range(8)) for _ in range(count)]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model, a reward model with the same tokenizer, and rows of every kind."""
    folder = tmp_path / "given"
    folder.mkdir()
    bytes_tokenizer().save(str(folder / "tokenizer"))
    model = Decoder(SHAPE, CONTEXT)
    model.start(3)
    hf.save(model, str(folder / "base"), say=quiet, tokenizer_folder=str(folder / "tokenizer"))
    judge = RewardModel(SHAPE, CONTEXT)
    judge.start(4)
    judge.score.data.normal_()
    save_reward(judge, str(folder / "judge"), Beside(str(folder / "tokenizer"), False), quiet, True)
    (folder / "text.txt").write_text("\n".join(sentences(4000)))
    words = sentences(64, seed=1)
    asked = [f"is {word.split()[0]}?" for word in words]
    answers = [f"yes {text.split()[0]}" for text in words]
    chats = [
        {"messages": [{"role": "user", "content": one}, {"role": "assistant", "content": other}]}
        for one, other in zip(asked, answers, strict=True)
    ]
    write_rows(folder / "chats.jsonl", chats * 4)
    pairs = [
        {"prompt": one, "chosen": other, "rejected": "no it is not"} for one, other in zip(asked, answers, strict=True)
    ]
    write_rows(folder / "pairs.jsonl", pairs)
    write_rows(folder / "prompts.jsonl", [{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(24)])
    (folder / "game.py").write_text(GAME)
    return folder


def settings_of(stage: str, folder: Path) -> list[str]:
    """Return the settings of the stage's run: STEPS small steps."""
    common = [
        "--preset", "small", "--context_length", str(CONTEXT), "--log_every", "1", "--eval_every", "0",
        "--max-steps", str(STEPS), "--checkpoint.every_steps", str(SAVED), "--learning-rate", "1e-3",
    ]  # fmt: skip
    if DEVICE == "cpu":
        common += ["--compile", "off"]
    base, batch = ["--model.load", str(folder / "base")], ["--batch.tokens", "1024", "--batch.micro", "4"]
    rows = str(folder / f"{'pairs' if stage in ('reward', 'dpo') else 'chats'}.jsonl")
    if stage == "pretrain":
        shape = ["--model.depth", "0", "--layers", "2", "--dim", "128", "--heads", "2", "--model.ff", "256"]
        return [*common, *batch, "--data", str(folder / "text.txt"), "--tokenizer.path", "bytes", *shape]
    if stage in ("midtrain", "sft"):
        return [*common, *base, *batch, "--data", rows]
    if stage in ("reward", "dpo"):
        return [*common, *base, *batch, f"--{stage}.pairs", rows, f"--{stage}.held_out", rows]
    reward = ["--grpo.reward_model", str(folder / "judge")]
    if stage == ROLLOUTS:
        reward = ["--grpo.rollout", f"{folder / 'game.py'}:rollout"]
    return [
        *common, *base, "--grpo.prompts", str(folder / "prompts.jsonl"), *reward, "--grpo.prompts_per_step", "4", "--grpo.group", "4", "--generate.new_tokens", "8", "--batch.micro", "4",
    ]  # fmt: skip


def run_of(stoker: Stoker, name: str) -> Path:
    return stoker.cwd / "runs" / f"forked-{name}"


def curve(run: Path) -> dict[int, float]:
    """Return the loss of each step; of GRPO the reward, which the reward model has a part in."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    key = "reward" if any("reward" in line for line in lines) else "loss"
    return {line["step"]: line[key] for line in lines if key in line}


@pytest.mark.parametrize(("stage", "method"), cases(ON_CPU_TOO, 24, COMBINATIONS))
def test_a_stage_trains_exports_and_resumes(stage: str, method: str, stoker: Stoker, folder: Path) -> None:
    settings, recipe = [*settings_of(stage, folder), *METHODS[method]], stage.split()[0]
    train(stoker, recipe, "first", *settings)
    first = run_of(stoker, "first")
    whole = curve(first)
    assert len(whole) == STEPS and all(value == value for value in whole.values()), whole
    result = json.loads((first / "result.json").read_text())
    assert result["stage"] == recipe and result["model"] == "hf"
    assert (first / "hf" / (adapters.WEIGHTS if "lora" in method else "model.safetensors")).exists()

    (saved,) = first.glob(f"checkpoints/step-*{SAVED:02}")
    done = train(stoker, recipe, "again", *settings, "--checkpoint.resume", str(saved))
    assert f"resumes at step {SAVED}" in done.out, done.out[-3000:]
    rest = curve(run_of(stoker, "again"))
    assert rest.keys() == {step for step in whole if step > min(whole) + SAVED - 1}
    if ON_GPU and recipe == "grpo":  # a sum in another order samples other tokens
        return
    wanted = {step: whole[step] for step in rest}
    assert rest == (pytest.approx(wanted, rel=2e-2, abs=2e-2) if ON_GPU else wanted)


MEASURES = [("evaluate", "full"), ("evaluate", "lora"), ("evaluate", "4 bits"), ("density", "full"), ("diversity", "full")]  # fmt: skip


def adapter_of(folder: Path) -> str:
    """Write an adapter's folder, trained by nobody."""
    model, told = Decoder(SHAPE, CONTEXT), adapters.AdapterConfig(method="lora", lora_rank=4)
    model.start(3)
    adapters.attach(model, told, 1)
    adapters.save(model, told, str(folder / "base"), str(folder / "adapter"), None, quiet)
    return str(folder / "adapter")


@pytest.mark.parametrize(("stage", "method"), cases(MEASURES, 10, MEASURES))
def test_a_stage_measures_a_model(stage: str, method: str, stoker: Stoker, folder: Path) -> None:
    load = adapter_of(folder) if method == "lora" else str(folder / "base")
    settings = ["--preset", "small", "--model.load", load, "--context_length", str(CONTEXT)]
    prompts = str(folder / "prompts.jsonl")
    if stage == "evaluate":
        settings += [
            "--evaluate.tasks", prompts, "--evaluate.draws", "2", "--evaluate.texts", str(folder / "text.txt"),
            "--generate.new_tokens", "8", "--eval_tokens", "2048",
        ]  # fmt: skip
        settings += ["--generate.bits", "4"] if method == "4 bits" else []
    elif stage == "density":
        settings += ["--density.prompts", prompts, "--density.clusters", "4"]
    else:
        settings += [
            "--diversity.prompts", prompts, "--diversity.baseline", str(folder / "base"), "--diversity.compared", load,
            "--diversity.most", "6", "--diversity.answers", "3", "--generate.new_tokens", "8",
        ]  # fmt: skip
    train(stoker, stage, "measured", *settings)
    result = json.loads((run_of(stoker, "measured") / "result.json").read_text())
    assert result["stage"] == stage
    if stage == "evaluate":
        assert result["metrics"]["all"]["total"] == 24 and 0 < result["metrics"]["bits_per_byte"] < 20
    if stage == "density":
        weights = (run_of(stoker, "measured") / "weights.jsonl").read_text().splitlines()
        assert len(weights) == 24
