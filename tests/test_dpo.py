"""DPO: its loss against a direct implementation, what a small model learns of held-out pairs, and a run that was killed."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from conftest import Stoker, at_length, at_length_but, wait_for
from stoker.contract.errors import EX_DATAERR
from stoker.training.data.formats.preferences import preference
from stoker.training.model import hf
from stoker.training.model.attention import documents
from stoker.training.model.config import ModelConfig
from stoker.training.model.decoder import Decoder
from stoker.training.model.hf_config import shape_for
from stoker.training.model.outside import Outside, load
from stoker.training.parallel.config import ParallelConfig
from stoker.training.parallel.group import Group
from stoker.training.recipes.dpo import DpoModel, OutsideReference, Reference, learner, measured, with_prompts
from stoker.training.reward.config import DpoConfig
from stoker.training.reward.pairs import Pair, PairRows, encode
from stoker.training.stages.registry import STAGES
from stoker.training.tokenizer.tokenizer import bytes_tokenizer

SMALL = ModelConfig(layers=2, dim=32, heads=4, kv_heads=2, head_dim=8, ff=48, vocab_size=320, init_std=0.2)
CONTEXT = 200


def rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """The better answer says yes. Some rows as hh-rlhf writes them, some as UltraFeedback."""
    draw = random.Random(seed)
    made: list[dict[str, Any]] = []
    for number in range(count):
        word = "".join(draw.choice("abcdef") for _ in range(draw.randint(2, 6)))
        asked, yes, no = f"is {word}?", f"yes {word}", f"no {word} it is"
        if number % 3 == 0:
            made.append({"prompt": asked, "chosen": yes, "rejected": no})
        elif number % 3 == 1:
            begun = f"\n\nHuman: hi\n\nAssistant: hello\n\nHuman: {asked}\n\nAssistant: "
            made.append({"chosen": begun + yes, "rejected": begun + no})
        else:
            user = {"role": "user", "content": asked}
            sides = [[user, {"role": "assistant", "content": answer}] for answer in (yes, no)]
            made.append({"prompt": asked, "chosen": sides[0], "rejected": sides[1], "score_chosen": 8.0})
    return made


def pairs(count: int, seed: int = 0) -> list[Pair]:
    return [encode(preference(row), bytes_tokenizer()) for row in rows(count, seed)]


def policy(rule: DpoConfig) -> Any:
    reference = Reference(SMALL, CONTEXT)
    reference.start(1)
    reference.normalised = rule.length_normalised
    model = learner(reference, rule).kind(SMALL, CONTEXT)
    model.start(2)
    assert isinstance(model, DpoModel)
    return model


def directly(model: Decoder, reference: Decoder, some: list[Pair], rule: DpoConfig) -> Tensor:
    """The loss as the papers write it: each conversation alone, nothing packed."""

    def logp(of: Decoder, ids: np.ndarray, learned: np.ndarray) -> Tensor:
        x = torch.tensor(ids.tolist())[None]
        each = torch.log_softmax(F.linear(of.hidden(x), of.head_weight)[0, :-1].float(), -1)
        each = each.gather(1, x[0, 1:, None])[torch.tensor(learned[1:]), 0]
        return each.mean() if rule.length_normalised else each.sum()

    losses = []
    for pair in some:
        ratio = torch.zeros(())
        for sign, ids, learned in ((1, pair.better, pair.learned), (-1, pair.worse, pair.learned_worse)):
            with torch.no_grad():
                before = logp(reference, ids, learned)
            ratio = ratio + sign * (logp(model, ids, learned) - before)
        ipo = (ratio - 1 / (2 * rule.beta)) ** 2
        losses.append(ipo if rule.loss == "ipo" else -F.logsigmoid(rule.beta * ratio))
    return torch.stack(losses).sum()


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
@pytest.mark.parametrize("normalised", [False, True])
def test_loss_and_gradient_are_those_of_a_direct_implementation(loss: str, normalised: bool) -> None:
    rule = DpoConfig(beta=0.3, loss=loss, length_normalised=normalised)
    model, some = policy(rule), pairs(7)
    packed = PairRows(some, CONTEXT, 0, answers=True)
    assert 1 < len(packed) < 7, "pairs lie beside each other"
    batch = packed.batch(np.arange(len(packed), dtype=np.int64))
    inputs, targets = torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets)
    assert batch.segments is not None
    where = documents(torch.from_numpy(batch.segments), torch.device("cpu"))
    found = model(inputs, targets, torch.tensor(0.5), where)
    found.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}  # type: ignore[union-attr]
    model.zero_grad()
    wanted = 0.5 * directly(model, model.reference, some, rule)
    wanted.backward()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        rounding = 1e-4 * float(parameter.grad.abs().max())  # sums in another order: the largest terms decide
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=rounding, msg=name)
    assert all(parameter.grad is None for parameter in model.reference.parameters())
    numbers = model.numbers()
    assert 0 <= numbers["reward_accuracy"] <= 1 and numbers["logp_chosen"] < 0 and model.numbers() == {}


def test_a_prompt_and_the_turns_of_its_answer_are_one_document() -> None:
    """Also where a row's last document has the number of the next row's first."""
    own = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, -1], [-1, 0, 0, 1, 1, 1, 1, -1, -1]])
    answer = torch.tensor([[0, 1, 1, 0, 1, 0, 1, 1, 1], [1, 1, 0, 0, 1, 0, 1, 1, 1]])
    packed, whole = (documents(rows, torch.device("cpu")) for rows in (2 * own + answer, own))
    assert packed is not None and whole is not None
    found, answers = with_prompts(packed)
    assert torch.equal(found.segments, own) and torch.equal(answers, (answer == 1) & (own >= 0))
    assert torch.equal(found.offsets.unique(), whole.offsets.unique()) and found.longest >= whole.longest
    assert torch.equal(found.offsets.sort().values, found.offsets)


def test_only_the_assistants_words_after_the_prompt_are_learned() -> None:
    words = bytes_tokenizer()
    row = {
        "chosen": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: d",
        "rejected": "\n\nHuman: a\n\nAssistant: X\n\nHuman: Y\n\nAssistant: Z",
    }
    pair = encode(preference(row), words)
    assert words.decode(pair.better[pair.learned].tolist()) == "b<|im_end|>d<|im_end|>"
    assert words.decode(pair.worse[pair.learned_worse].tolist()) == "X<|im_end|>Z<|im_end|>"


def test_an_untrained_model_has_no_margin() -> None:
    model = policy(DpoConfig())
    model.load_state_dict(model.reference.state_dict())
    packed = PairRows(pairs(9), CONTEXT, 0, answers=True)
    found = measured(model, packed, Group(ParallelConfig(device="cpu")), 2)
    assert found.ratio.abs().max() < 1e-5 and len(found.ratio) == 9


@pytest.fixture
def begin(tmp_path: Path) -> Path:
    bytes_tokenizer().save(str(tmp_path / "tokenizer"))
    model = Decoder(SMALL, CONTEXT)
    model.start(3)
    hf.save(model, str(tmp_path / "begin"), say=lambda line: None, tokenizer_folder=str(tmp_path / "tokenizer"))
    for name, some in (("pairs", rows(200)), ("other", rows(60, seed=9))):
        text = "".join(json.dumps(row) + "\n" for row in some)
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    return tmp_path


def words(folder: Path, name: str, *more: str) -> list[str]:
    return [
        "train", "dpo", "--name", name, "--preset", "small",
        "--model.load", str(folder / "begin"), "--dpo.pairs", str(folder / "pairs.jsonl.gz"),
        "--dpo.held_out", str(folder / "other.jsonl.gz"), "--context_length", str(CONTEXT), "--batch.tokens", "1200",
        "--batch.micro", "2", "--learning-rate", "1e-3", "--log_every", "1", "--parallel.device", "cpu",
        "--eval_every", "0", "--max-steps", "24", *more,
    ]  # fmt: skip


def curve(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    newest = {line["step"]: line["loss"] for line in lines if "val_loss" not in line}
    return [newest[step] for step in sorted(newest)]


def weights(run: Path) -> bytes:
    return (run / "hf" / "model.safetensors").read_bytes()


def test_held_out_pairs_are_learned(stoker: Stoker, begin: Path) -> None:
    done = stoker.torch(*words(begin, "one"))
    assert done.code == 0, done.out + done.err
    (one,) = (stoker.cwd / "runs").glob("*-one")
    told = json.loads((one / "result.json").read_text())
    metrics = told["metrics"]
    assert metrics["accuracy"] >= 0.9 and metrics["total"] == 60 and metrics["reward_margin"] > 0
    assert metrics["val_right"] == metrics["accuracy"] and metrics["logp_chosen"] > metrics["logp_rejected"]
    assert "of held-out pairs" in STAGES["dpo"].headline(metrics) and list(STAGES["dpo"].report(metrics))
    lines = [json.loads(line) for line in (one / "metrics.jsonl").read_text().splitlines()]
    for line in lines:  # every step's own
        assert {"reward_accuracy", "reward_margin", "logp_chosen", "logp_rejected"} <= line.keys()
    assert abs(lines[0]["reward_margin"]) < 1e-4 < lines[9]["reward_margin"], "the first step knows no difference"
    hf.opened(str(one / "hf"), CONTEXT, torch.float32, torch.device("cpu"), lambda line: None)


@at_length  # pretraining and SFT are killed by default
def test_a_killed_run_ends_as_if_nobody_had_killed_it(stoker: Stoker, begin: Path) -> None:
    done = stoker.torch(*words(begin, "one"))
    assert done.code == 0, done.out + done.err
    (one,) = (stoker.cwd / "runs").glob("*-one")
    again = words(begin, "killed", "--checkpoint.every_steps", "1")
    job = stoker.start(*again, env={"OMP_NUM_THREADS": "1"})
    saved = wait_for(lambda: list((stoker.cwd / "runs").glob("*-killed/checkpoints/step-*5/manifest.json")) or None, 90)
    up = [event["pid"] for event in stoker.result().events if event["event"] == "rank-up"]
    for pid in (job.pid, *up):
        os.kill(pid, signal.SIGKILL)
    output, _ = job.communicate(timeout=60)
    assert saved, output
    (killed,) = (stoker.cwd / "runs").glob("*-killed")
    assert not (killed / "result.json").exists() and len(curve(killed)) < 24
    done = stoker.torch(*again)
    assert done.code == 0 and "resumes at step" in done.out, done.out + done.err
    assert curve(killed) == curve(one) and weights(killed) == weights(one)


@at_length  # SFT and the reward model are compared by default
def test_two_ranks_learn_what_one_learns(stoker: Stoker, begin: Path) -> None:
    for name, ranks in (("one", "1"), ("two", "2")):
        done = stoker.torch(*words(begin, name, "--nproc-per-node", ranks))
        assert done.code == 0, done.out + done.err
    (one,), (two,) = ((stoker.cwd / "runs").glob(f"*-{name}") for name in ("one", "two"))
    assert curve(two) == pytest.approx(curve(one), rel=1e-3)


@pytest.fixture
def bloom(begin: Path) -> Path:
    """An architecture that no family knows, in the place of the model."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(3)
    none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=272, **none)
    shutil.rmtree(begin / "begin")
    transformers.BloomForCausalLM(config).save_pretrained(begin / "begin")
    bytes_tokenizer().save(str(begin / "begin"))
    return begin


@pytest.mark.parametrize("normalised", [False, True])
def test_with_transformers_own_module_the_loss_is_that_of_a_direct_implementation(
    normalised: bool, bloom: Path
) -> None:
    rule, folder = DpoConfig(beta=0.3, length_normalised=normalised), str(bloom / "begin")
    shape = shape_for(ModelConfig(), folder)
    reference = OutsideReference(shape, CONTEXT)
    load(reference, folder, lambda line: None)
    reference.normalised = normalised
    kind = learner(reference, rule).outside
    assert kind is not None
    model = kind(shape, CONTEXT)
    load(model, folder, lambda line: None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    assert not {name for name, _ in model.named_parameters() if "reference" in name}
    some = pairs(7)
    rows_ = PairRows(some, CONTEXT, 0, answers=True)
    batch = rows_.batch(np.arange(len(rows_), dtype=np.int64))
    assert batch.segments is not None
    where = documents(torch.from_numpy(batch.segments), torch.device("cpu"))
    found = model(torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets), torch.tensor(0.5), where)
    found.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}  # type: ignore[union-attr]
    model.zero_grad()

    def logp(of: Outside, ids: np.ndarray, learned: np.ndarray) -> Tensor:
        x = torch.tensor(ids.tolist())[None]
        each = torch.log_softmax(of.module(input_ids=x).logits[0, :-1], -1).gather(1, x[0, 1:, None])
        each = each[torch.tensor(learned[1:]), 0]
        return each.mean() if normalised else each.sum()

    wanted = torch.zeros(())
    for pair in some:
        ratio = logp(model, pair.better, pair.learned) - logp(model, pair.worse, pair.learned_worse)
        with torch.no_grad():
            before = logp(reference, pair.better, pair.learned) - logp(reference, pair.worse, pair.learned_worse)
        wanted = wanted - 0.5 * F.logsigmoid(rule.beta * (ratio - before))
    wanted.backward()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-5, msg=name)


@at_length  # test_engine.py trains one by default
def test_an_unknown_architecture_learns_pairs_and_a_reward_model_of_it_is_refused(stoker: Stoker, bloom: Path) -> None:
    from safetensors.torch import load_file

    before = load_file(bloom / "begin" / "model.safetensors")
    done = stoker.torch(*words(bloom, "bloom", "--max-steps", "12"))
    assert done.code == 0, done.out + done.err
    (run,) = (stoker.cwd / "runs").glob("*-bloom")
    assert "BloomForCausalLM is computed by transformers' own module" in done.out
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert abs(lines[0]["reward_margin"]) < 1e-4 < lines[9]["reward_margin"], "the reference stays where it was"
    assert json.loads((run / "result.json").read_text())["metrics"]["accuracy"] > 0.6
    after = load_file(run / "hf" / "model.safetensors")
    assert after.keys() == before.keys() and any(not torch.equal(after[name], before[name]) for name in before)

    given = [word.replace("dpo", "reward") for word in words(bloom, "scores")]
    done = stoker.torch(*given)
    assert done.code == 78 and "model.engine transformers does not support a reward model" in done.err, done.err
    assert "Traceback" not in done.out + done.err


def hh_shaped() -> list[dict[str, str]]:
    """As hh-rlhf's files are: dialogues in a text, that part ways in the last answer or before it; a few are of no use."""
    begin, made = "\n\nHuman: What is {}?\n\nAssistant: A number.\n\nHuman: And more?\n\nAssistant:", []
    for n in range(300):
        start = begin.format(n)
        made.append({"chosen": f"{start} {n + 1}", "rejected": f"{start} none\n\nHuman: Why?\n\nAssistant: So." if n % 7 == 0 else f"{start} none"})  # fmt: skip
    made[10] = {"chosen": begin.format(10), "rejected": begin.format(10) + " no"}
    made[20] = {"chosen": begin.format(20) + " 21", "rejected": begin.format(20) + " 21"}
    made[30] = {"chosen": begin.format(30) + " 31" * 500, "rejected": begin.format(30) + " no"}
    return made


def ultra_shaped() -> list[dict[str, Any]]:
    """As UltraFeedback's: a prompt, two lists of messages that repeat it, the chosen one once more, scores."""
    made = []
    for n in range(40):
        sides = [
            [{"content": f"What is {n}?", "role": "user"}, {"content": text, "role": "assistant"}]
            for text in (f"It is {n}.", "I don't know.")
        ]
        made.append(
            {
                "prompt": f"What is {n}?", "prompt_id": str(n), "chosen": sides[0], "rejected": sides[1], "messages": sides[0],
                "score_chosen": 8.5, "score_rejected": 3.0,
            }
        )  # fmt: skip
    return made


@pytest.mark.parametrize("stage", at_length_but(["dpo"], ["dpo", "reward"]))
def test_pairs_as_published_are_used_or_listed_with_the_reason(stage: str, stoker: Stoker, begin: Path) -> None:
    for name, some in (("pairs", hh_shaped()), ("other", ultra_shaped())):
        text = "".join(json.dumps(row) + "\n" for row in some)
        (begin / f"{name}.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    given = [word.replace("dpo", stage) for word in words(begin, stage, "--max-steps", "1", "--context_length", "300")]
    done = stoker.torch(*given)
    assert done.code == 0, done.out + done.err
    said, path = done.out + done.err, f"{stage}.pairs {begin / 'pairs.jsonl.gz'}"
    assert f"{path}: 2 of 300 rows are not usable pairs: chosen has an empty answer (row 11);" in said
    assert "chosen and rejected are the same text (row 21); left out" in said
    assert (
        f"{path}: 1 of 300 pairs are too long: both answers have more tokens" in said and "(row 31); left out" in said
    )
    assert f"{path}: 297 pairs in the format preference" in said
    (run,) = (stoker.cwd / "runs").glob(f"*-{stage}")
    assert json.loads((run / "result.json").read_text())["metrics"]["total"] == 40, "every row of the other file"


@pytest.mark.parametrize("stage", ["dpo", "reward"])
def test_the_announced_steps_are_the_steps_of_the_run(stage: str, stoker: Stoker, begin: Path) -> None:
    """Short and long pairs: the prompt is read twice, and rows have padding."""
    some = [{"prompt": "what? " * (n % 7), "chosen": "yes " * (1 + n % 11), "rejected": "no"} for n in range(1, 200)]
    (begin / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    given = ["--model.load", str(begin / "begin"), f"--{stage}.pairs", str(begin / "pairs.jsonl")]
    given += ["--context_length", str(CONTEXT), "--parallel.device", "cpu", "--eval_every", "0", "--name", "counted"]
    done = stoker.torch("train", stage, "--preset", "small", *given)
    assert done.code == 0, done.out + done.err
    (announced,) = re.findall(r"length +(about )?([\d,]+) steps", done.out + done.err)
    lines = [json.loads(line) for line in (stoker.result().run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = 1 + max(line["step"] for line in lines if "loss" in line)
    assert announced == ("", f"{steps}") and steps > 5


@pytest.mark.parametrize("stage", ["dpo", "reward"])
def test_rows_that_are_no_pairs_are_refused_before_a_run_starts(stage: str, stoker: Stoker, begin: Path) -> None:
    (begin / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n' * 20)
    given = ["--model.load", str(begin / "begin"), f"--{stage}.pairs", str(begin / "chats.jsonl")]
    done = stoker.torch("train", stage, "--preset", "small", "--parallel.device", "cpu", *given)
    assert done.code == EX_DATAERR and "chats.jsonl" in done.err and "Traceback" not in done.err, done.err
    assert not (stoker.cwd / "runs").exists(), "nothing started"
