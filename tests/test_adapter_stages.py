"""Adapters in the stages that compare or score: DPO, the reward model, GRPO. The model under them is the reference."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import numpy as np
import torch

from conftest import Stoker, at_length_but
from forked_recipes import trained
from stoker.contract.frozen import replace
from stoker.training.model import adapters, hf
from stoker.training.model.attention import documents
from stoker.training.model.config import AdapterConfig
from stoker.training.model.decoder import Decoder
from stoker.training.model.hf_config import shape_of
from stoker.training.model.reference import Beginning
from stoker.training.parallel.config import ComputeConfig
from stoker.training.recipes.dpo import learner
from stoker.training.reward.config import DpoConfig
from stoker.training.reward.model import open_reward, scores
from stoker.training.reward.pairs import PairRows, answered
from stoker.training.tokenizer.tokenizer import bytes_tokenizer
from test_dpo import CONTEXT, SMALL, curve, directly, pairs, rows

SHAPE = replace(SMALL, dim=64, heads=4, kv_heads=2, head_dim=16, ff=128)
CPU = torch.device("cpu")
TOLD = AdapterConfig(method="lora", lora_rank=4, lora_alpha=8.0)


def quiet(line: str) -> None:
    pass


def base(folder: Path) -> str:
    bytes_tokenizer().save(str(folder / "tokenizer"))
    model = Decoder(SHAPE, CONTEXT)
    model.start(3)
    hf.save(model, str(folder / "base"), say=quiet, tokenizer_folder=str(folder / "tokenizer"))
    return str(folder / "base")


def opened(folder: str, told: AdapterConfig, kind: type[Decoder] = Decoder) -> Decoder:
    with torch.device("meta"):
        model = kind(shape_of(folder), CONTEXT)
    adapters.freeze(model, told)
    model.place(CPU)
    hf.load_named(model, hf.named(model), folder, quiet)
    adapters.attach(model, told, 0)
    return model


def stir(model: Decoder, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapters.learned(model).values():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("method", ["lora", "qlora"])
@pytest.mark.parametrize("also", ["", "lm_head,norm,embed_tokens"])
@pytest.mark.parametrize("loaded", [False, True])
def test_dpo_beside_adapters_is_dpo_with_a_whole_copy_as_its_reference(
    method: str, also: str, loaded: bool, tmp_path: Path
) -> None:
    folder, rule = base(tmp_path), DpoConfig(beta=0.3)
    told = replace(TOLD, method=method, also_train=also.removeprefix("lm_head," if SHAPE.tied else ""))
    model = opened(folder, told, learner(None, rule).kind)
    if loaded:  # an adapter that was trained before: it is a part of what this run begins with
        stir(model, 1)
    model.begun = Beginning(model, loaded=loaded)  # type: ignore[assignment]
    copy = opened(folder, told)
    copy.load_state_dict(model.state_dict())
    stir(model, 2)
    some = pairs(5)
    packed = PairRows(some, CONTEXT, 0, answers=True)
    batch = packed.batch(np.arange(len(packed), dtype=np.int64))
    assert batch.segments is not None
    inputs, targets = torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets)
    found = model(inputs, targets, torch.tensor(0.5), documents(torch.from_numpy(batch.segments), CPU))
    found.backward()
    gradients = {name: p.grad.clone() for name, p in adapters.learned(model).items() if p.grad is not None}
    model.zero_grad()
    wanted = 0.5 * directly(model, copy, some, rule)
    wanted.backward()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert gradients.keys() == adapters.learned(model).keys()
    for name, parameter in adapters.learned(model).items():
        assert parameter.grad is not None
        rounding = 1e-4 * float(parameter.grad.abs().max())
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=rounding, msg=name)


def given(folder: Path) -> Path:
    base(folder)
    for name, some in (("pairs", rows(120)), ("other", rows(40, seed=9))):
        text = "".join(json.dumps(row) + "\n" for row in some)
        (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    return folder


def words(stage: str, folder: Path, load: Path, name: str, *more: str) -> list[str]:
    return [
        "train", stage, "--name", name, "--preset", "small", "--model.load", str(load),
        f"--{stage}.pairs", str(folder / "pairs.jsonl.gz"), f"--{stage}.held_out", str(folder / "other.jsonl.gz"),
        "--context_length", str(CONTEXT), "--batch.tokens", "1200", "--batch.micro", "2", "--learning-rate", "5e-3",
        "--log_every", "1", "--parallel.device", "cpu", "--eval_every", "0", "--max-steps", "12", *more,
    ]  # fmt: skip


def run_of(stoker: Stoker, name: str) -> Path:
    (found,) = (stoker.cwd / "runs").glob(f"*-{name}")
    return found


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_dpo_trains_an_adapter_and_a_second_run_compares_with_the_first_ones_model(
    stoker: Stoker, tmp_path: Path
) -> None:
    folder = given(tmp_path)
    done = trained(stoker, words("dpo", folder, folder / "base", "first", "--qlora", "--lora-rank", "4"))
    assert done.code == 0 and "without a copy of its own" in done.out, done.out + done.err
    first = run_of(stoker, "first")
    assert json.loads((first / "result.json").read_text())["metrics"]["accuracy"] >= 0.9
    lines = metrics(first)
    assert abs(lines[0]["reward_margin"]) < 1e-4 < lines[-1]["reward_margin"]
    asked = [json.loads(line) for line in (first / "samples.jsonl").read_text().splitlines()]
    assert [row["step"] for row in asked] == [0] * 3 + [12] * 3 and asked[0]["wanted"].startswith("yes "), asked
    assert (first / "hf" / adapters.WEIGHTS).exists() and not (first / "hf" / "model.safetensors").exists()

    more = ("--qlora", "--checkpoint.every_steps", "4")
    done = trained(stoker, words("dpo", folder, first / "hf", "second", *more))
    assert done.code == 0, done.out + done.err
    second = run_of(stoker, "second")
    start = metrics(second)[0]
    assert abs(start["reward_margin"]) < 1e-4, "the reference is the loaded model, not the base under it"
    chosen = [line["logp_chosen"] for line in (lines[0], start)]
    assert abs(chosen[0] - chosen[1]) > 0.1, "and it began with what the first run learned"
    # A resumed run reads the adapter from the checkpoint, and the reference from the folder.
    (saved,) = second.glob("checkpoints/step-*08")
    done = trained(stoker, words("dpo", folder, first / "hf", "again", *more, "--checkpoint.resume", str(saved)))
    assert done.code == 0 and "resumes at step 8" in done.out, done.out + done.err
    assert curve(run_of(stoker, "again")) == curve(second)[8:]


@pytest.mark.parametrize("likelihood", at_length_but(["true"], ["true", "false"]))
def test_a_reward_model_learns_its_score_beside_adapters_and_peft_opens_it(
    likelihood: str, stoker: Stoker, tmp_path: Path
) -> None:
    folder = given(tmp_path)
    more = ("--lora", "--lora-rank", "4", "--reward.likelihood", likelihood, "--learning-rate", "1e-2")
    done = trained(stoker, words("reward", folder, folder / "base", "judge", *more))
    assert done.code == 0, done.out + done.err
    run = run_of(stoker, "judge")
    assert json.loads((run / "result.json").read_text())["metrics"]["accuracy"] >= 0.9
    settings = json.loads((run / "hf" / adapters.SETTINGS).read_text())
    assert settings["task_type"] == "SEQ_CLS" and settings["modules_to_save"] == ["score"]
    model = open_reward(str(run / "hf"), CONTEXT, ComputeConfig(), CPU)
    assert model.score.any() and ("trust" in model.own) == (likelihood == "true")
    asked = [("is abc?", "yes abc"), ("is abc?", "no abc it is")]
    better, worse = scores(model, bytes_tokenizer(), asked, CPU)
    assert better > worse
    # Another run continues with adapter and score.
    begin = ("--reward.likelihood", likelihood, "--lora", "--max-steps", "1", "--learning-rate", "1e-9")
    done = trained(stoker, words("reward", folder, run / "hf", "on", *begin))
    assert done.code == 0, done.out + done.err
    on = open_reward(str(run_of(stoker, "on") / "hf"), CONTEXT, ComputeConfig(), CPU)
    assert scores(on, bytes_tokenizer(), asked, CPU) == pytest.approx([better, worse], abs=1e-4)
    refused = stoker.torch("chat", str(run / "hf"), "--prompt", "hello?")
    assert refused.code != 0 and "reward model" in refused.err and "Traceback" not in refused.err, refused.err

    peft = pytest.importorskip("peft", reason="no peft here to compare with")
    theirs = peft.AutoPeftModelForSequenceClassification.from_pretrained(str(run / "hf"), num_labels=1)
    theirs.config.pad_token_id = 0
    ids = torch.tensor([answered(bytes_tokenizer(), *one) for one in asked[:1]])
    read, _ = model.parts(ids, None)
    torch.testing.assert_close(theirs(ids).logits[:, 0], read[:, -1], rtol=1e-3, atol=1e-3)
    # Its own folder has no file of ours: the score alone is read.
    theirs.save_pretrained(tmp_path / "back")
    back = open_reward(str(tmp_path / "back"), CONTEXT, ComputeConfig(), CPU)
    torch.testing.assert_close(back.score, model.score)
    torch.testing.assert_close(back.parts(ids, None)[0], read, rtol=1e-4, atol=1e-4)
