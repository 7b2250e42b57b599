"""The same command under the same --name: resumed, nothing to do, or refused because its files changed since."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import Done, Stoker

EX_USAGE = 64
TINY = ("--debug", "--train.max_steps", "2", "--nproc-per-node", "1", "--data.context_length", "64")


def run_ids(stoker: Stoker) -> list[str]:
    return sorted(path.name for path in (stoker.cwd / "runs").iterdir() if not path.is_symlink())


def assert_nothing_to_do(stoker: Stoker, *command: str) -> None:
    before = run_ids(stoker)
    done = stoker(*command)
    assert done.code == 0 and "nothing to do" in done.err and run_ids(stoker) == before, done.err


def assert_refused(stoker: Stoker, what: str, *command: str) -> None:
    """One line with both choices, and nothing written to the runs folder."""
    before = {path: path.stat().st_mtime_ns for path in (stoker.cwd / "runs").rglob("*")}
    refused = stoker(*command)
    lines = [line for line in refused.err.splitlines() if line.startswith("stoker: ")]
    assert refused.code == EX_USAGE and len(lines) == 1, refused.err
    assert what in lines[0] and "--name" in lines[0] and "--again" in lines[0], lines
    assert {path: path.stat().st_mtime_ns for path in (stoker.cwd / "runs").rglob("*")} == before


@pytest.mark.parametrize(
    ("words", "file", "changed"),
    [
        (("job.py",), "job.py", "job.py"),
        (("-m", "job"), "job.py", "job"),
        (("-m", "package"), "package/__main__.py", "package"),
        (("-m", "package.entry"), "package/part.py", "a module that package.entry imports"),
        (("job.py",), "helper.py", "a module that job.py imports"),
        (("job.py",), "package/part.py", "a module that job.py imports"),
        (("job.py", "--config", "job.yaml"), "job.yaml", "job.yaml"),
        (("job.py", "--config=job.yaml"), "job.yaml", "job.yaml"),
        (("--no-python", "./job.sh"), "job.sh", "./job.sh"),
        (("--no-python", "bash", "job.sh"), "job.sh", "job.sh"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_a_finished_run_is_refused_when_its_program_changed(
    stoker: Stoker, words: tuple[str, ...], file: str, changed: str
) -> None:
    for name, text in {
        "job.py": "import helper\ndef late():\n    from package import entry\n",
        "helper.py": "A = 1\n",
        "unused.py": "A = 1\n",
        "job.yaml": "lr: 1\n",
        "job.sh": "#!/bin/sh\ntrue\n",
        "package/__init__.py": "",
        "package/__main__.py": "",
        "package/entry.py": "from .part import A\n",
        "package/part.py": "A = 1\n",
    }.items():
        (stoker.cwd / name).parent.mkdir(exist_ok=True)
        stoker.script(name, text)
    (stoker.cwd / "job.sh").chmod(0o755)
    command = ("run", "--nproc-per-node", "1", "--name", "exp", *words)
    first = stoker(*command)
    assert first.code == 0, first.err
    os.utime(stoker.cwd / file)
    stoker.script("unused.py", "A = 2\n")
    assert_nothing_to_do(stoker, *command)
    comment = (stoker.cwd / file).read_text() + "\n# changed\n"
    stoker.script(file, comment)
    assert_refused(stoker, f"{changed} changed since", *command)


def test_again_runs_a_finished_run_anew_and_keeps_the_old_one(stoker: Stoker) -> None:
    command = ("run", "--nproc-per-node", "1", "--name", "exp", stoker.script("job.py", "print('old')\n"))
    old = stoker(*command).run_dir
    stoker.script("job.py", "import stoker\nprint('new', stoker.resume())\n")
    anew = stoker(command[0], "--again", *command[1:])
    assert anew.code == 0 and anew.run_dir != old and anew.log(0) == b"new None\n"
    assert (old / "attempt-0/rank-0.log").read_bytes() == b"old\n"
    assert stoker("logs", "exp").out == "new None\n" and stoker("logs", old.name).out == "old\n"
    assert_nothing_to_do(stoker, *command)
    stoker.script("job.py", "print('newer')\n")
    assert_refused(stoker, "job.py changed since", *command)
    assert_refused(stoker, "job.py changed since", *(old.name if word == "exp" else word for word in command))


def test_an_unfinished_run_is_resumed_with_a_changed_script_and_says_so(stoker: Stoker) -> None:
    command = ("run", "--nproc-per-node", "1", "--name", "exp", stoker.script("job.py", "raise SystemExit(3)\n"))
    first = stoker(*command)
    same = stoker(*command)
    assert (first.code, same.code) == (3, 3) and "changed since" not in same.err
    stoker.script("job.py", "print('fixed')\n")
    fixed = stoker(*command)
    assert fixed.code == 0 and fixed.run_dir == first.run_dir and "job.py changed since" in fixed.err, fixed.err
    assert_nothing_to_do(stoker, *command)
    stoker.script("job.py", "raise SystemExit(3)\n")  # as it was when the run began, not when it finished
    assert_refused(stoker, "job.py changed since", *command)


def test_a_file_that_the_script_makes_is_no_change(stoker: Stoker) -> None:
    script = stoker.script("job.py", "import sys\nopen(sys.argv[1], 'a').write('{}')\n")
    command = ("run", "--nproc-per-node", "1", "--name", "exp", script, "result.json")
    assert stoker(*command).code == 0 and (stoker.cwd / "result.json").exists()
    assert_nothing_to_do(stoker, *command)


def test_a_record_without_digests_says_that_changes_are_unknown(stoker: Stoker) -> None:
    command = ("run", "--nproc-per-node", "1", "--name", "exp", stoker.script("job.py", "print('old')\n"))
    record = stoker(*command).run_dir / "run.json"
    data = json.loads(record.read_text())
    del data["contents"]
    record.write_text(json.dumps(data))
    stoker.script("job.py", "print('new')\n")
    done = stoker(*command)
    assert done.code == 0 and "nothing to do" in done.err and "no digests" in done.err


def test_a_run_without_a_name_is_checked_when_its_id_is_given(stoker: Stoker) -> None:
    first = stoker("run", "--nproc-per-node", "1", stoker.script("job.py", "print('old')\n"))
    command = ("run", "--nproc-per-node", "1", "--name", first.run_dir.name, "job.py")
    assert_nothing_to_do(stoker, *command)
    stoker.script("job.py", "print('new')\n")
    assert_refused(stoker, "job.py changed since", *command)


def test_a_finished_job_of_roles_is_refused_when_a_roles_script_changed(stoker: Stoker) -> None:
    one, two = stoker.script("one.py", "print(1)\n"), stoker.script("two.py", "print(2)\n")
    command = ("run", "--name", "job", "--role", f"one:1:{one}", "--role", f"two:1:{two}")
    assert stoker(*command).code == 0
    assert_nothing_to_do(stoker, *command)
    stoker.script("two.py", "print(3)\n")
    assert_refused(stoker, "two.py changed since", *command)


def test_a_finished_role_of_a_resumed_job_runs_again_when_its_script_changed(stoker: Stoker) -> None:
    stoker.script("first.py", "print('old')\n")
    stoker.script(
        "second.py",
        "import glob, os, sys, time\n"
        "roles = os.path.dirname(os.environ['STOKER_RUN_DIR'])\n"
        "while not glob.glob(os.path.join(roles, '*-first', 'verdict.json')): time.sleep(0.05)\n"
        "sys.exit(3)\n",
    )
    roles = ("--role", "first:1:first.py", "--role", "second:1:second.py")
    command = ("run", "--name", "job", *roles)
    assert stoker(*command).code == 3
    finished = [path for path in stoker.latest.glob("roles/*-first*")]
    assert [json.loads((path / "verdict.json").read_text())["status"] for path in finished] == ["completed"]
    stoker.script("first.py", "print('new')\n")
    stoker.script("second.py", "print('fixed')\n")
    done = stoker(*command)
    assert done.code == 0 and "[first] CPU0:new" in done.out + done.err, done.out + done.err


def test_launch_calls_the_function_again_under_the_same_name(stoker: Stoker) -> None:
    """It returns the function's results, so it never takes those of an earlier call."""

    def results(value: int) -> Any:
        text = f"import stoker\ndef f(): return {value}\nif __name__ == '__main__':\n"
        script = stoker.script("caller.py", text + "    print(stoker.launch(f, nproc=1, name='exp'))\n")
        done = subprocess.run(
            [sys.executable, script], cwd=stoker.cwd, env=stoker.env, capture_output=True, text=True, check=True
        )
        return done.stdout.splitlines()[-1]

    assert [results(1), results(2), results(2)] == ["{0: 1}", "{0: 2}", "{0: 2}"]
    assert len(run_ids(stoker)) == 3


def train(stoker: Stoker, *words: str) -> Done:
    done = stoker("train", *words, env={"OMP_NUM_THREADS": "1"})
    assert done.code == 0, done.err
    return done


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs folder of a tiny pretraining run called base, beside its data."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("pretrained")
    (folder / "book.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "STOKER_GPU_LOCKS": str(folder / "locks"), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "stoker", "train", "pretrain", *TINY, "--data", "book.txt", "--name", "base"]
    subprocess.run(command, cwd=folder, env=env, check=True)
    return folder


def test_a_finished_training_run_is_refused_when_its_data_changed(stoker: Stoker) -> None:
    pytest.importorskip("torch")
    book = stoker.cwd / "book.txt"
    book.write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    command = ("train", "pretrain", *TINY, "--data", "book.txt", "--name", "base")
    old = train(stoker, *command[1:]).run_dir
    os.utime(book)
    assert_nothing_to_do(stoker, *command)
    book.write_text("she sells sea shells by the sea shore\n" * 400)
    assert_refused(stoker, "the prepared data changed since", *command)
    anew = train(stoker, *command[1:], "--again")
    assert anew.run_dir != old and (old / "hf").is_dir() and (anew.run_dir / "hf").is_dir()
    weights = [(run / "hf" / "model.safetensors").read_bytes() for run in (old, anew.run_dir)]
    assert weights[0] != weights[1]


def test_again_refuses_a_checkpoint_folder_with_the_old_result(stoker: Stoker) -> None:
    pytest.importorskip("torch")
    (stoker.cwd / "book.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    command = ("pretrain", *TINY, "--data", "book.txt", "--name", "base", "--checkpoint.folder", "saved")
    train(stoker, *command)
    refused = stoker("train", *command, "--again")
    assert refused.code == EX_USAGE and "--checkpoint.resume never" in refused.err, refused.err
    anew = train(stoker, *command, "--again", "--checkpoint.resume", "never")
    steps = [json.loads(line)["step"] for line in (anew.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert 1 in steps, steps


def test_a_finished_evaluation_is_refused_when_its_questions_or_model_changed(stoker: Stoker, pretrained: Path) -> None:
    questions = stoker.cwd / "questions.jsonl"
    questions.write_text('{"prompt": "the quick", "answer": "brown"}\n')
    model = stoker.cwd / "model"
    subprocess.run(["cp", "-r", next((pretrained / "runs").glob("2*")) / "hf", model], check=True)
    tiny = ("--nproc-per-node", "1", "--data.context_length", "64", "--generate.new_tokens", "4")
    command = (
        "train",
        "evaluate",
        *tiny,
        "--model.load",
        "model",
        "--evaluate.tasks",
        "questions.jsonl",
        "--name",
        "e",
    )
    train(stoker, *command[1:])
    for file in (questions, model / "model.safetensors"):
        os.utime(file)
    assert_nothing_to_do(stoker, *command)
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[:-4] + bytes(4))
    assert_refused(stoker, "model.load model changed since", *command)
    (model / "model.safetensors").write_bytes(weights)
    assert_nothing_to_do(stoker, *command)
    questions.write_text('{"prompt": "the quick", "answer": "fox"}\n')
    assert_refused(stoker, "evaluate.tasks questions.jsonl changed since", *command)


@pytest.mark.parametrize("words", [("job.py",), ("--role", "a:1:job.py", "--role", "b:1:job.py")], ids=["run", "job"])
def test_a_dry_run_prints_what_its_name_means_as_the_start_does(stoker: Stoker, words: tuple[str, ...]) -> None:
    stoker.script("job.py", "")
    more = ("other",) if words == ("job.py",) else ("--role", "c:1:job.py")
    assert stoker("run", "--name", "exp", *words).code == 0
    (first,) = run_ids(stoker)
    dry = stoker("run", "--name", "exp", "--dry-run", *words, *more)
    assert dry.code == 0 and run_ids(stoker) == [first]
    real = stoker("run", "--name", "exp", *words, *more)
    (notice,) = [line for line in real.err.splitlines() if f"({first})" in line]
    assert real.code == 0 and notice in dry.err.splitlines() and len(run_ids(stoker)) == 2
