"""Attacks that a review found: each of them once worked."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import Stoker
from localuser import ATTACKER, VICTIM, do_as, start_as, wait
from stoker.contract import layout, redact
from stoker.contract.names import Refusal
from stoker.contract.shapes import Verdict
from stoker.contract.yamltext import NotYaml, parse_yaml
from stoker.control.agent.reservations import GpuLocks
from stoker.control.launch.description import git_revision
from stoker.control.launch.torchfiles import tell_launcher
from stoker.control.record.writer import RunRecord
from stoker.control.watch.numbers import Losses

SOON = 5.0

# ---- texts that take long to search ----


@pytest.mark.parametrize(
    "line",
    [b"loss" + b" " * 60_000 + b"x", b"loss " + b"1" * 60_000 + b"x", b"loss=1." + b"1" * 60_000 + b"x"],
    ids=["spaces", "digits", "decimals"],
)
def test_a_printed_line_does_not_hold_the_launcher_up(line: bytes) -> None:
    began = time.process_time()
    assert Losses().read(0, line + b"\n") == []
    assert time.process_time() - began < SOON


def test_a_step_of_five_thousand_digits_is_a_step_like_any_other() -> None:
    (bad,) = Losses().read(0, b"step " + b"9" * 5000 + b" loss nan\n")
    assert bad.kind == "loss"


@pytest.mark.parametrize(
    "piece",
    ["authorization: -----BEGIN RSA PRIVATE KEY-----\\n", "-----BEGIN PRIVATE KEY-----\nA: b\n"],
    ids=["headers", "lines"],
)
def test_many_beginnings_of_private_keys_are_read_once(piece: str) -> None:
    began = time.process_time()
    assert "BEGIN" not in redact.whole(piece * (1_000_000 // len(piece)))
    assert time.process_time() - began < SOON


# ---- a .git above the working directory, which anybody can make in /tmp ----


def test_a_named_pipe_as_head_does_not_hold_the_launcher_up(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    os.mkfifo(tmp_path / ".git" / "HEAD")
    code = f"from stoker.control.launch.description import git_revision; print(git_revision({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout == "None\n", done.stderr


@pytest.mark.parametrize(
    "head",
    [b"\xff\xfe\x00", b"ref: ../../secret", b"ref: refs/../../../secret", b"x" * 100_000_000, b"\x1b]0;owned\x07"],
)
def test_nothing_but_a_commit_is_read_from_a_strangers_repository(tmp_path: Path, head: bytes) -> None:
    (tmp_path / "secret").write_text("a secret\n")
    (tmp_path / "project" / ".git" / "refs").mkdir(parents=True)
    (tmp_path / "project" / ".git" / "HEAD").write_bytes(head)
    assert git_revision(str(tmp_path / "project")) is None


# ---- a json.py and a torch.py in the working directory ----


@pytest.mark.parametrize(
    "command", [["doctor"], ["cluster", "check", "--hosts", "localhost"]], ids=["doctor", "cluster-check"]
)
def test_looking_at_a_machine_imports_nothing_from_the_working_directory(stoker: Stoker, command: list[str]) -> None:
    for name in ("json", "torch", "numpy", "ctypes", "importlib_metadata"):
        (stoker.cwd / f"{name}.py").write_text(
            f"open({str(stoker.cwd / 'owned')!r}, 'w').close()\nraise ImportError('planted')\n"
        )
    done = subprocess.run(
        [sys.executable, "-P", "-m", "stoker", *command],
        cwd=stoker.cwd,
        env=stoker.env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "planted" not in done.stdout + done.stderr
    assert not (stoker.cwd / "owned").exists()


def test_a_recipe_imports_nothing_from_the_working_directory(stoker: Stoker) -> None:
    """As where somebody goes to the folder of a model or of data from elsewhere, and trains there."""
    for name in ("json", "torch", "numpy", "stoker"):
        (stoker.cwd / f"{name}.py").write_text(
            f"open({str(stoker.cwd / 'owned')!r}, 'w').close()\nraise ImportError('planted')\n"
        )
    (stoker.cwd / "notes.txt").write_text("\n".join(map(str, range(20_000))))
    command = [sys.executable, "-c", "import sys; del sys.path[0]; from stoker.cli.main import entry; entry()"]
    words = ["train", "pretrain", "--preset", "debug", "--data", "notes.txt", "--max_steps", "2"]
    done = subprocess.run(
        [*command, *words], cwd=stoker.cwd, env=stoker.env, capture_output=True, text=True, timeout=300, check=False
    )
    assert not (stoker.cwd / "owned").exists()
    assert done.returncode == 0, done.stdout + done.stderr


# ---- a runs folder whose owner puts another directory in a run's place ----


def test_the_record_is_not_written_through_links(public: Path) -> None:
    """The attacker owns the runs folder, so he may rename what others have in it."""
    runs, precious, swapped = public / "runs", public / "precious", public / "swapped"
    run_dir = runs / "20260101-000000-x"

    def share_a_folder() -> None:
        runs.mkdir()
        runs.chmod(0o1777)

    def swap() -> None:
        run_dir.rename(runs / "stolen")
        for folder in (run_dir, run_dir / "attempt-0"):
            folder.mkdir()
            folder.chmod(0o777)
        for name in ("rank-0.log", "rank-0.stack.txt"):
            (run_dir / "attempt-0" / name).symlink_to(precious)

    def run_there() -> None:
        precious.write_text("precious")
        run_dir.mkdir(0o700)
        record = RunRecord(str(run_dir), "host", reopened=False)
        while not swapped.exists():
            time.sleep(0.01)
        try:
            record.attempt(0)
        except Refusal as refusal:
            assert "moved or replaced" in refusal.line
        else:
            raise AssertionError("ranks would be started in the attacker's folder")
        record.output(layout.rank_log(str(run_dir), 0, 0), b"a line\n")
        record.save(layout.rank_stack(str(run_dir), 0, 0), "a stack")
        assert precious.read_text() == "precious"
        assert len(record.lost()) == 2

    do_as(ATTACKER, share_a_folder)
    victim = start_as(VICTIM, run_there)
    deadline = time.monotonic() + 10.0
    while not (run_dir / layout.RESERVE).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    do_as(ATTACKER, swap)
    swapped.touch()
    assert wait(victim) == 0


# ---- files that block, and a disk that others filled ----


def test_an_error_file_that_is_a_pipe_is_not_waited_for(stoker: Stoker) -> None:
    os.mkfifo(stoker.cwd / "pipe")
    stoker.script("fail.py", "raise SystemExit(3)\n")
    done = stoker("run", "fail.py", env={"TORCHELASTIC_ERROR_FILE": str(stoker.cwd / "pipe")}, timeout=60)
    assert done.code == 3 and "TORCHELASTIC_ERROR_FILE" in done.err


def test_the_launchers_error_file_has_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    tell_launcher(
        Verdict("refused", "launch.x", "no host at https://me:hunter2hunter2@example.org", 69), "", lambda line: None
    )
    assert "hunter2" not in (tmp_path / "error.json").read_text()


def test_a_whole_number_in_sixties_without_end_is_refused_at_once() -> None:
    with pytest.raises(NotYaml, match="a whole number of 250001 characters"):
        parse_yaml("a: 1" + ":1" * 125_000)


def test_a_full_disk_does_not_keep_a_gpu_from_being_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user can fill /tmp; the lock itself needs no room."""
    if os.getuid() != 0:
        pytest.skip("a file system of its own takes root")
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4k,mode=1777", "none", str(tmp_path)], check=False
    ).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        (tmp_path / "locks").mkdir()
        (tmp_path / "locks").chmod(0o1777)
        (tmp_path / "locks" / "GPU-1").touch(0o666)
        with (tmp_path / "full").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(b"x" * 4096):
                pass
        monkeypatch.setenv("STOKER_GPU_LOCKS", str(tmp_path / "locks"))
        locks, second = GpuLocks("run"), GpuLocks("second")
        assert locks.take(["GPU-1"]) == {}
        assert list(second.take(["GPU-1"])) == ["GPU-1"]
        del locks
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)
