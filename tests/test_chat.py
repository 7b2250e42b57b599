"""`stoker chat` and `stoker export`: what they find, what they print, and that transformers answers the same."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

import pytest
import torch

from conftest import Stoker
from small_model import SHAPE, write_model
from stoker.cli import chat, export
from stoker.contract import host_memory
from stoker.contract.errors import EX_UNAVAILABLE, Refusal
from stoker.contract.frozen import as_json, replace
from stoker.training.checkpoint.saver import Saver
from stoker.training.data.learn import train
from stoker.training.generate.conversation import Conversation
from stoker.training.generate.finding import find
from stoker.training.model import hf, hf_config
from stoker.training.model.config import ModelConfig, parameters
from stoker.training.model.decoder import Decoder
from stoker.training.model.hf_config import shape_for
from stoker.training.model.outside import Outside
from stoker.training.tokenizer.tokenizer import bytes_tokenizer, load

TEXTS = [
    "the quick brown fox jumps over the lazy dog\n",
    "she sells sea shells by the sea shore\n",
    "what is two and three? it is five.\n",
] * 3


def nothing(_: str) -> None:
    pass


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An hf folder as a run's export leaves it."""
    folder = tmp_path_factory.mktemp("model")
    words = train(TEXTS, 300, str(folder / "tokenizer"))
    shape = ModelConfig(
        layers=2,
        dim=32,
        heads=4,
        kv_heads=2,
        head_dim=8,
        ff=48,
        vocab_size=words.vocab_size,
        qk_norm=True,
        init_std=0.3,
    )
    made = Decoder(shape, 128)
    made.start(5)
    hf.save(made, str(folder / "hf"), say=nothing, tokenizer_folder=str(folder / "tokenizer"))
    return folder / "hf"


def run_of(folder: Path, model: Path, stage: str, when: float) -> Path:
    shutil.copytree(model, folder / "hf")
    (folder / "result.json").write_text(json.dumps({"schema": 1, "stage": stage, "metrics": {}, "model": "hf"}))
    os.utime(folder / "hf" / "config.json", (when, when))
    return folder


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[str, str]:
    assert chat.main([*argv]) == 0
    out = capsys.readouterr()
    return out.out, out.err


def test_one_shot_prints_the_answer_and_nothing_else_on_stdout(stoker: Stoker, model: Path) -> None:
    done = stoker(
        "chat",
        str(model),
        "--prompt",
        "What is two and three?",
        "--temperature",
        "0",
        "--max-tokens",
        "12",
        "--device",
        "cpu",
    )
    assert done.code == 0 and done.out.endswith("\n") and len(done.out) > 1
    assert "stoker:" not in done.out and "parameters" in done.err
    missing = stoker("chat", "nowhere", "--prompt", "x")
    assert missing.code == 66 and missing.out == "" and len(missing.err.splitlines()) == 1


def test_transformers_opens_the_export_and_answers_the_same(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    out = tmp_path / "out"
    assert export.main([str(model), str(out)]) == 0
    words, theirs = (
        transformers.AutoTokenizer.from_pretrained(out),
        transformers.AutoModelForCausalLM.from_pretrained(out),
    )
    for text in ("What is two and three?", "the quick brown fox", "¿Qué? 12 3"):
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": text}]
        ids = words.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        whole = theirs.generate(**ids, do_sample=False, max_new_tokens=30, pad_token_id=0)
        want = words.decode(
            whole[0, ids["input_ids"].shape[1] :], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        found, _ = said(
            capsys,
            str(out),
            "--system",
            "be brief",
            "--prompt",
            text,
            "--temperature",
            "0",
            "--max-tokens",
            "30",
            "--device",
            "cpu",
        )
        assert found == want + "\n"
    ends = json.loads((out / "generation_config.json").read_text())["eos_token_id"]
    special = load(str(out)).special
    assert ends == [special["<|im_end|>"], special["<|endoftext|>"]]


def test_an_export_in_bf16_is_half_as_large_and_replaces_an_earlier_one(model: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    for kind in ("fp32", "bf16"):
        assert export.main([str(model), out, "--dtype", kind, "--force"]) == 0
    sizes = [os.path.getsize(os.path.join(folder, "model.safetensors")) for folder in (str(model), out)]
    assert 1.8 < sizes[0] / sizes[1] < 2.1
    assert json.loads(Path(out, "config.json").read_text())["torch_dtype"] == "bfloat16"
    with pytest.raises(Refusal, match="the folder of the model"):
        export.main([out, out])


def test_a_template_that_training_wrote_is_not_called_the_tokenizers_own(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export.main([str(model), str(tmp_path / "once")]) == 0
    assert export.main([str(tmp_path / "once"), str(tmp_path / "twice")]) == 0
    assert "of its own" not in "".join(capsys.readouterr())
    written = [json.loads((tmp_path / name / "tokenizer_config.json").read_text()) for name in ("once", "twice")]
    assert written[0]["chat_template"] == written[1]["chat_template"]


@pytest.mark.parametrize(("answer", "told"), [("", True), (" \n", True), ("seven", False)])
def test_an_empty_answer_is_said_to_be_empty(answer: str, told: bool, capsys: pytest.CaptureFixture[str]) -> None:
    def pieces(text: str) -> Iterator[str]:
        yield from answer

    chat._print_answer(cast(Conversation, SimpleNamespace(answer=pieces)), "?")
    shown = capsys.readouterr()
    assert ("(empty answer)" in shown.err) == told and shown.out == f"{answer}\n"


def test_a_template_of_its_own_stays(model: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(model, own)
    (own / "chat_template.jinja").write_text("{{ messages }}")
    assert export.main([str(own), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert "chat_template" not in json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())


def checkpoint(folder: Path, model: Path) -> Path:
    shape = hf.shape_of(str(model))
    decoder = Decoder(shape, 128)
    hf.load(decoder, str(model), nothing)
    meta = {"step": 7, "model": as_json(shape), "data": {"context": 128}, "tokenizer_digest": load(str(model)).digest}
    saver = Saver(str(folder / "checkpoints"), rank=0, world=1, token="t", say=nothing, keep=2, keep_best=False)
    saver.save(
        7,
        {f"model.{name}": parameter.detach() for name, parameter in decoder.named_parameters()},
        meta,
        None,
        wait=True,
    )
    saver.close()
    return folder


def test_a_checkpoint_becomes_the_same_folder(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = checkpoint(tmp_path / "run", model)
    with pytest.raises(Refusal, match="stoker export"):
        chat.main([str(run), "--prompt", "x"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refusal, match="--tokenizer"):
        export.main([str(run), str(tmp_path / "out")])
    shutil.copytree(model.parent / "tokenizer", tmp_path / "cache" / "tokenizers" / "one")
    for where in (run, run / "checkpoints" / "step-00000007"):
        assert export.main([str(where), str(tmp_path / "out"), "--force"]) == 0
        assert (tmp_path / "out" / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
        assert "chat_template" in json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())


def test_a_checkpoint_trained_on_bytes_finds_its_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`save` adds an eos_token, which a tokenizer of bytes has not: it is the same tokenizer."""
    monkeypatch.chdir(tmp_path)
    words = bytes_tokenizer()
    shape = ModelConfig(layers=1, dim=16, heads=2, kv_heads=2, head_dim=8, ff=16, vocab_size=words.vocab_size)
    decoder = Decoder(shape, 128)
    decoder.start(5)
    meta = {"step": 7, "model": as_json(shape), "data": {"context": 128}, "tokenizer_digest": words.digest}
    saver = Saver("run/checkpoints", rank=0, world=1, token="t", say=nothing, keep=2, keep_best=False)
    tensors = {f"model.{name}": parameter.detach() for name, parameter in decoder.named_parameters()}
    saver.save(7, tensors, meta, None, wait=True)
    saver.close()
    words.save("cache/datasets/one/tokenizer")
    assert export.main(["run", "out"]) == 0
    assert load("out").has_digest(words.digest) and load("out").digest != words.digest
    config = Path("cache/datasets/one/tokenizer/tokenizer_config.json")
    config.write_text(json.dumps({"eos_token": "<|im_end|>"}))
    with pytest.raises(Refusal, match="--tokenizer"):
        export.main(["run", "other"])


def test_the_model_is_found_by_run_by_stage_or_as_the_newest(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, now = tmp_path / "runs", time.time()
    single = run_of(root / "20260101-000000-mine", model, "pretrain", now - 50)
    (single / "run.json").write_text(json.dumps({"name": "mine", "started": 1.0}))
    speedrun = root / "speedrun-cpu"
    sft = run_of(speedrun / "stages" / "20260101-000000-sft-0123abcd", model, "sft", now - 30)
    base = run_of(speedrun / "stages" / "20260101-000000-base-0123abcd", model, "pretrain", now - 40)
    reward = run_of(speedrun / "stages" / "20260101-000000-reward-0123abcd", model, "reward", now - 10)

    def which(*argv: str) -> str:
        _, err = said(capsys, *argv, "--runs-dir", str(root), "--prompt", "x", "--max-tokens", "1", "--device", "cpu")
        lines = [line for line in err.splitlines() if not line.endswith("(empty answer)")]
        return lines[-1].split(": ")[1]

    for _ in range(2):  # by what lies there, then by chain.json
        assert (
            which() == which(str(speedrun)) == str(sft / "hf")
        )  # newer than the others; a reward model does not answer
        assert which(str(speedrun), "--stage", "base") == str(base / "hf")
        with pytest.raises(Refusal, match="stages with a model: base, sft"):
            chat.main([str(speedrun), "--stage", "grpo"])
        rows = [
            {"name": name, "stage": stage, "run": f"stages/{run.name}"}
            for name, stage, run in (("base", "pretrain", base), ("sft", "sft", sft), ("reward", "reward", reward))
        ]
        (speedrun / "chain.json").write_text(json.dumps({"schema": 1, "stages": rows}))
    rows[1]["run"] = ""  # the chain was last run with other settings, and did not get there
    (speedrun / "chain.json").write_text(json.dumps({"schema": 1, "stages": rows}))
    assert which(str(speedrun)) == which(str(speedrun), "--stage", "sft") == str(sft / "hf")
    assert (
        "stage sft has no model with the last settings"
        in said(capsys, str(speedrun), "--prompt", "x", "--max-tokens", "1", "--device", "cpu")[1]
    )
    with pytest.raises(Refusal, match="gives scores"):
        chat.main([str(speedrun), "--stage", "reward"])
    assert find(str(speedrun), "reward", str(root), print, checkpoints=True).folder == str(reward / "hf")
    assert which("--stage", "pretrain") == str(base / "hf")
    assert which("mine") == which(str(single)) == str(single / "hf")
    with pytest.raises(Refusal, match="reward model"):
        chat.main([str(reward)])
    (root / "20260102-000000-failed").mkdir()
    (root / "20260102-000000-failed" / "run.json").write_text(json.dumps({"name": "failed", "started": 2.0}))
    with pytest.raises(Refusal, match=r"failed has no model: .* \(the newest model of another run there: .*mine/hf\)"):
        chat.main([str(root / "20260102-000000-failed")])
    with pytest.raises(Refusal, match="no run in"):
        chat.main(["--runs-dir", str(tmp_path / "empty")])
    with pytest.raises(Refusal, match="leave --stage sft out, or name a speedrun"):
        chat.main([str(model), "--stage", "sft"])


def test_the_model_of_a_job_is_that_of_its_role(model: Path, tmp_path: Path) -> None:
    root, now = tmp_path / "runs", time.time()
    run_of(root / "20260101-000000-older", model, "sft", now - 50)
    job = root / "20260102-000000-server-trainer"
    trainer = run_of(job / "roles" / "20260102-000001-trainer", model, "grpo", now - 10)
    server = job / "roles" / "20260102-000000-server"
    server.mkdir()
    for run, name in ((job, "server-trainer"), (trainer, "trainer"), (server, "server")):
        (run / "run.json").write_text(json.dumps({"name": name, "started": now}))
    (root / "latest").symlink_to(job.name)
    lines: list[str] = []
    for where in (str(root / "latest"), str(job), "server-trainer"):
        for checkpoints in (False, True):
            assert find(where, None, str(root), lines.append, checkpoints).folder == str(trainer / "hf")
    assert (
        find(None, None, str(root), print).folder == find(None, "grpo", str(root), print).folder == str(trainer / "hf")
    )
    assert all(f"{job.name}/roles/{trainer.name}" in line for line in lines) and len(lines) == 6, lines
    with pytest.raises(Refusal, match=f"it has no config.json; use {trainer}/hf"):
        hf_config.shape_for(ModelConfig(), str(job))
    critic = run_of(job / "roles" / "20260102-000001-critic", model, "sft", now - 10)
    (critic / "run.json").write_text(json.dumps({"name": "critic", "started": 2.0}))
    with pytest.raises(
        Refusal, match=r"several models: name one of .*-critic \(role critic\), .*-trainer \(role trainer\)"
    ):
        find(str(job), None, str(root), print)


def test_a_model_that_is_on_another_host_is_said_to_be_there(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "20260102-000000-mine"
    run_of(tmp_path / "runs" / "20260101-000000-older", model, "sft", time.time())
    run.mkdir()
    words = ["scp", "-r", "-P", "2222", "me@10.0.0.1:"]
    about = {"name": "mine", "plan": {"ranks": [{"rank": 0, "host": "10.0.0.1"}]}, "apart": {"10.0.0.1": words}}
    (run / "run.json").write_text(json.dumps(about))
    with pytest.raises(Refusal, match=r"it is not complete, .* host 10\.0\.0\.1; no checkpoint of it is known$"):
        find(str(run), None, str(tmp_path / "runs"), print)
    ended = {"status": "completed", "cause": "completed", "summary": "", "exit_code": 0}
    (run / "verdict.json").write_text(json.dumps(ended))
    with pytest.raises(Refusal) as refused:
        find(str(run), None, str(tmp_path / "runs"), print)
    copy = f"scp -r -P 2222 me@10.0.0.1:{run}/hf {os.path.relpath(run)}/"
    assert "its files are on host 10.0.0.1; to copy the model: " + copy in refused.value.line
    assert "older" not in refused.value.line


def test_without_a_name_the_last_stage_of_the_newest_speedrun_answers_whichever_file_is_newest(
    model: Path, tmp_path: Path
) -> None:
    root, now = tmp_path / "runs", time.time()
    speedrun = root / "speedrun-cpu"
    ages = {
        "base": 40,
        "midtrain": 30,
        "sft": 5,
        "reward": 25,
        "grpo-uniform": 20,
        "grpo-density": 15,
    }  # sft was trained again, after all the others
    stages = {"base": "pretrain", "grpo-uniform": "grpo", "grpo-density": "grpo"}
    runs = {
        name: run_of(speedrun / "stages" / f"20260101-000000-{name}-0123abcd", model, stages.get(name, name), now - age)
        for name, age in ages.items()
    }
    run_of(root / "20260101-000000-older", model, "pretrain", now - 50)

    def newest(stage: str | None = None) -> str:
        return find(None, stage, str(root), print).folder

    assert newest() == str(runs["grpo-density"] / "hf"), "by the order of the stages, where there is no chain.json"
    rows = [{"name": name, "stage": stages.get(name, name), "run": f"stages/{run.name}"} for name, run in runs.items()]
    rows[4], rows[5] = rows[5], rows[4]  # a chain of another order
    (speedrun / "chain.json").write_text(json.dumps({"schema": 1, "stages": rows}))
    assert newest() == find(str(speedrun), None, str(root), print).folder == str(runs["grpo-uniform"] / "hf"), (
        "by chain.json"
    )
    assert newest("sft") == str(runs["sft"] / "hf") and newest("base") == newest("pretrain") == str(runs["base"] / "hf")
    alone = run_of(root / "20260102-000000-mine", model, "sft", now)
    assert newest() == newest("sft") == str(alone / "hf"), "a run of its own that is newer than the speedrun"


def test_a_long_conversation_forgets_its_oldest_turns_and_says_so_once(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("the quick brown fox\n\n" * 8 + "sea " * 200 + "\nthe lazy dog\n"))
    out, err = said(capsys, str(model), "--max-tokens", "10", "--seed", "3", "--device", "cpu")
    assert err.count("oldest turns are forgotten") == 1
    assert err.count("shorten it") == 1, "what never fits is refused, and the conversation goes on"
    assert len(out) > 9


def test_the_same_seed_gives_the_same_answer_and_raw_goes_on_with_a_text(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = (str(model), "--prompt", "the quick brown", "--max-tokens", "20", "--device", "cpu", "--temperature", "1.5")
    one, two, other, raw = (
        said(capsys, *told, *more)[0]
        for more in (["--seed", "1"], ["--seed", "1"], ["--seed", "2"], ["--raw", "--seed", "1"])
    )
    assert one == two and len({one, other, raw}) == 3
    with pytest.raises(Refusal, match="--raw can't be combined with --system"):
        chat.main([*told, "--raw", "--system", "x"])


def test_a_tokenizer_without_chat_marks_is_refused_with_the_way_out(model: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(model, plain)
    told: dict[str, Any] = json.loads((plain / "tokenizer.json").read_text())
    told["added_tokens"] = [one for one in told["added_tokens"] if "im_" not in one["content"]]
    (plain / "tokenizer.json").write_text(json.dumps(told))
    with pytest.raises(Refusal, match="--raw continues plain text"):
        chat.main([str(plain), "--prompt", "x", "--device", "cpu"])
    assert export.main([str(plain), str(tmp_path / "out")]) == 0
    assert "chat_template" not in json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())


def test_ctrl_c_stops_the_answer_and_ctrl_d_leaves(stoker: Stoker, tmp_path: Path, model: Path) -> None:
    endless = tmp_path / "endless"  # the last token again and again, a line's end
    shape = hf.shape_of(str(model))
    decoder = Decoder(shape, 4096)
    hf.load(decoder, str(model), nothing)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.startswith("layers."):
                parameter.zero_()
    hf.save(decoder, str(endless), say=nothing, tokenizer_folder=str(model))
    ours, theirs = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "stoker",
        "chat",
        str(endless),
        "--temperature",
        "0",
        "--max-tokens",
        "4000",
        "--device",
        "cpu",
    ]
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=stoker.cwd,
        env=stoker.environment({"OMP_NUM_THREADS": "1", "TERM": "dumb"}),
    )
    os.close(theirs)
    seen = ""

    def until(words: str, begin: int) -> int:
        nonlocal seen
        deadline = time.monotonic() + 90
        while words not in seen[begin:]:
            assert time.monotonic() < deadline, seen
            if select.select([ours], [], [], 0.1)[0]:
                seen += os.read(ours, 65536).decode(errors="replace")
        return seen.index(words, begin) + len(words)

    try:
        place = until("> ", until("Ctrl-D exits", 0))
        os.write(ours, b"fox\n")
        place = until("\r\n" * 5, until("fox", place))
        process.send_signal(signal.SIGINT)
        place = until("> ", place)
        assert seen.count("\n") < 3900, "it wrote the whole answer"
        os.write(ours, b"\x04")
        assert process.wait(100) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_weights_that_the_memory_cant_hold_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "m")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # which --device cpu sets, for good
    words = ["--device", "cpu", "--prompt", "hi", "--max-tokens", "1"]
    assert chat.main([str(tmp_path / "m"), *words]) == 0
    monkeypatch.setattr(host_memory, "read_memory", lambda: (4 * parameters(SHAPE) - 1, 1 << 40, None))
    with pytest.raises(Refusal, match=r"parameters take .* of memory or more, and this machine has") as problem:
        chat.main([str(tmp_path / "m"), *words])
    assert problem.value.code == EX_UNAVAILABLE and str(tmp_path / "m") in problem.value.line
    asked = replace(SHAPE, engine="transformers", load="")
    with pytest.raises(Refusal, match="of memory or more"):
        Outside(shape_for(asked, str(tmp_path / "m")), 16)


def only(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    total = 1 << 40
    monkeypatch.setattr(host_memory, "read_memory", lambda: (total, free, total))


def test_a_model_is_opened_in_the_memory_that_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "m")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # which --device cpu sets, for good
    only(4 * parameters(SHAPE) - 1, monkeypatch)
    with pytest.raises(Refusal, match=r"parameters take .* of memory or more, and .* is free") as problem:
        chat.main([str(tmp_path / "m"), "--device", "cpu", "--prompt", "hi", "--max-tokens", "1"])
    assert problem.value.code == EX_UNAVAILABLE
