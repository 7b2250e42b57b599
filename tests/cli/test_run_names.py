"""Every command that takes a run or a model understands the same ways to name it, whatever run came last."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from conftest import Done, Stoker, at_length_but
from stoker.control.record.rollouts_log import Rollout, RolloutsWriter

TEXT = "the quick brown fox jumps over the lazy dog\n" * 400
TINY = (
    "--debug",
    "--train.max_steps",
    "2",
    "--nproc-per-node",
    "1",
    "--data.context_length",
    "64",
    "--data",
    "book.txt",
)
EX_NOINPUT = 66

RUN_COMMANDS = {
    "why": ("why",),
    "logs": ("logs",),
    "attach": ("attach",),
    "plot": ("plot",),
    "compare": ("compare", "base"),
    "web": ("web", "--save"),
    "top": ("top", "--once"),
    "rollouts": ("rollouts",),
    "nan": ("nan",),
    "stop": ("stop",),
    "detach": ("detach",),
}
WAYS = ("name", "id", "folder", "absolute", "latest", "runs/latest")
MODEL_WAYS = (*WAYS, "runs/latest/hf", "id/hf")


def shell(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "STOKER_GPU_LOCKS": str(folder / "locks"), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-m", "stoker", *words], cwd=folder, env=env, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs: `base` made a model, and the newer `broken` failed with a NaN before it made one."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "book.txt").write_text(TEXT)
    base = shell(folder, "train", "pretrain", *TINY, "--name", "base")
    assert base.returncode == 0, base.stderr
    broken = shell(folder, "train", "pretrain", *TINY, "--name", "broken", "--nan.inject", "layers.1.attention@1")
    assert broken.returncode != 0, broken.stderr
    for run in (folder / "runs").glob("2*"):
        file = RolloutsWriter(str(run), 0, 1 << 20)
        file.write([Rollout(1, 1, 0, "?", run.name, 0.5, {"exact": 0.5}, False, 3, False)])
        file.close()
    return folder


@pytest.fixture
def two_runs(stoker: Stoker, trained: Path) -> Stoker:
    shutil.copytree(trained, stoker.cwd, symlinks=True, dirs_exist_ok=True)
    return stoker


def way_of(stoker: Stoker, name: str, way: str) -> str:
    (run,) = (stoker.cwd / "runs").glob(f"2*-{name}")
    ways = {
        "name": name,
        "id": run.name,
        "folder": f"runs/{run.name}",
        "absolute": str(run),
        "id/hf": f"runs/{run.name}/hf",
    }
    return ways.get(way, way)


def without_times(done: Done) -> tuple[int, str]:
    text = done.out.replace(f"{done.cwd}/", "")
    return done.code, re.sub(r"\d+(\.\d+)? ?(s|ms|min|h|%|MB|GB)\b|\d\d:\d\d:\d\d|\d+\.\d+", "", text)


def shown(stoker: Stoker, command: str, which: str) -> tuple[int, str]:
    if command == "web":
        done = stoker("web", "--save", which, "page.html")
        return done.code, "".join(sorted(set(re.findall(r"\d{8}-\d{6}-\w+", (stoker.cwd / "page.html").read_text()))))
    if command == "top":  # which run the view shows
        done = stoker("top", "--once", "--json", which)
        return done.code, ",".join(sorted(run["id"] for run in json.loads(done.out)["runs"]))
    return without_times(stoker(*RUN_COMMANDS[command], which))


@pytest.mark.parametrize("command", RUN_COMMANDS)
def test_a_run_is_named_in_the_same_ways_everywhere(two_runs: Stoker, command: str) -> None:
    expected = shown(two_runs, command, way_of(two_runs, "broken", "absolute"))
    assert expected[1], expected
    if command not in ("top", "stop", "detach"):
        assert expected != shown(two_runs, command, "base") or command == "compare"
    for way in WAYS:
        assert shown(two_runs, command, way_of(two_runs, "broken", way)) == expected, way


@pytest.mark.parametrize("command", RUN_COMMANDS)
def test_an_unknown_run_is_one_line_with_near_matches(two_runs: Stoker, command: str) -> None:
    for which in ("brokn", "runs/brokn"):
        more = ("page.html",) if command == "web" else ()
        done = two_runs(*RUN_COMMANDS[command], which, *more)
        assert done.code == EX_NOINPUT and done.out == "" and len(done.err.splitlines()) == 1, done.err
        assert "'broken'" in done.err or " broken" in done.err, done.err


def dry_run(stoker: Stoker, stage: str, *words: str) -> str:
    """What a `stoker train` would load: the line of its settings."""
    done = stoker("train", stage, *words, "--dry-run", "--no-preflight")
    assert done.code == 0, done.err
    return done.out + done.err


def model_used(stoker: Stoker, command: str, which: str) -> str:
    """What a command prints when it is given a model."""
    if command == "export":
        done = stoker.torch("export", which, "out", "--force")
        assert done.code == 0, done.err
        weights = (stoker.cwd / "out" / "model.safetensors").read_bytes()
        same = [path for path in stoker.cwd.glob("runs/2*/hf/model.safetensors") if path.read_bytes() == weights]
        return f"{same}\n{done.err}"
    if command == "chat":
        done = stoker.torch("chat", which, "--prompt", "x", "--max-tokens", "1", "--device", "cpu")
        assert done.code == 0, done.err
        return done.err
    if command == "fit":
        done = stoker("fit", which, "--gpus", "24GB", "--json")
        assert done.code == 0, done.err
        return json.loads(done.out)["model"] + done.err
    if command == "serve":
        server = stoker.start("serve", which, "--port", "0", "--device", "cpu", env={"OMP_NUM_THREADS": "1"})
        assert server.stdout is not None
        lines = []
        for line in server.stdout:
            lines.append(line.decode())
            if "http://" in lines[-1]:
                break
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=100)
        return "".join(lines)
    if command == "evaluate":
        return dry_run(stoker, "evaluate", "--model.load", which, "--evaluate.tasks", "questions.jsonl")
    if command == "diversity":
        words = ("--diversity.prompts", "questions.jsonl", "--diversity.baseline", which, "--diversity.compared", which)
        return dry_run(stoker, "diversity", "--model.load", which, *words)
    return dry_run(stoker, "sft", f"--model.load={which}", "--data", "chats.jsonl")


MODEL_COMMANDS = ("chat", "export", "fit", "sft", "evaluate", "diversity", "serve")
CASES = [f"{command} {way}" for command in MODEL_COMMANDS for way in MODEL_WAYS]
SLOW = [case for case in CASES if case.startswith("serve ") and case != "serve runs/latest"]


@pytest.mark.parametrize("case", at_length_but([case for case in CASES if case not in SLOW], CASES))
def test_a_model_is_named_in_the_same_ways_everywhere(two_runs: Stoker, case: str) -> None:
    """After a failed run `latest` is the newest run that has a model, and a line says which and why."""
    command, way = case.split()
    two_runs.script("questions.jsonl", '{"prompt": "the quick", "answer": "brown"}\n')
    turns = [{"role": "user", "content": "how many?"}, {"role": "assistant", "content": "seven"}]
    two_runs.script("chats.jsonl", (json.dumps({"messages": turns}) + "\n") * 20)
    base, broken = (way_of(two_runs, name, "id") for name in ("base", "broken"))
    text = model_used(two_runs, command, way_of(two_runs, "base", way))
    assert base in text, text
    if "latest" in way:
        lines = [line for line in text.splitlines() if f"runs/{base}" in line and broken in line]
        assert len(set(lines)) == 1, text


@pytest.mark.parametrize("command", MODEL_COMMANDS)
def test_an_unknown_model_is_one_line_with_near_matches(two_runs: Stoker, command: str) -> None:
    for which in ("bse", "runs/bse", "runs/bse/hf"):
        words = {
            "export": ("export", which, "out"),
            "sft": ("train", "sft", "--model.load", which, "--data", "book.txt"),
            "evaluate": ("train", "evaluate", "--model.load", which, "--evaluate.tasks", "book.txt"),
            "diversity": ("train", "diversity", "--model.load", "base", "--diversity.baseline", which),
        }.get(command, (command, which))
        done = two_runs(*words)
        lines = [line for line in done.err.splitlines() if which.split("/")[-1] in line or "bse" in line]
        assert done.code == EX_NOINPUT and len(lines) == 1 and re.search(r"\bbase\b", lines[0]), done.err


def test_a_failed_fine_tuning_after_a_good_one(two_runs: Stoker) -> None:
    """sft, then a failed run of the same name: the commands of the README use the model of the first."""
    turns = [{"role": "user", "content": "how many?"}, {"role": "assistant", "content": "seven"}]
    two_runs.script("chats.jsonl", (json.dumps({"messages": turns}) + "\n") * 40)
    env = {"OMP_NUM_THREADS": "1"}
    words = ("--model.load", "runs/latest/hf", "--data", "chats.jsonl", "--name", "tuned", "--train.max_steps", "2")
    sft = ("train", "sft", "--debug", "--nproc-per-node", "1", "--data.context_length", "64", *words)
    first = two_runs(*sft, env=env)
    assert first.code == 0, first.err
    good = first.run_dir.name
    same = two_runs(*sft, env=env)
    assert same.code == 0 and "nothing to do" in same.err, "its own model is not what `latest` means to it"
    failed = two_runs(*sft, "--again", "--nan.inject", "layers.1.attention@1", env=env)
    assert failed.code != 0 and failed.run_dir.name != good
    for which in ("runs/latest/hf", "latest", "tuned", "tuned/hf"):
        chat = two_runs.torch("chat", which, "--prompt", "x", "--max-tokens", "1", "--device", "cpu")
        assert chat.code == 0 and f"runs/{good} (stage sft)" in chat.err and failed.run_dir.name in chat.err, chat.err
    refused = two_runs.torch("chat", f"runs/{failed.run_dir.name}", "--prompt", "x")
    assert refused.code == EX_NOINPUT, "a run that is named by its folder is that run"
    pair = {"prompt": "1 + 1?", "chosen": "two", "rejected": "three"}
    (two_runs.cwd / "pairs.jsonl").write_text((json.dumps(pair) + "\n") * 10)
    text = dry_run(two_runs, "dpo", "--model.load", "runs/latest/hf", "--dpo.pairs", "pairs.jsonl")
    assert f"load: runs/{good}/hf" in text, text


def test_resume_takes_a_runs_name(two_runs: Stoker) -> None:
    done = two_runs(
        "train",
        "pretrain",
        *TINY,
        "--train.max_steps",
        "3",
        "--checkpoint.resume",
        "base",
        env={"OMP_NUM_THREADS": "1"},
    )
    assert done.code == 0 and "resumes at step 2" in done.out + done.err, done.err
