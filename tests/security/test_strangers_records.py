"""What other users leave in shared folders ends no command, and their records are read within bounds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import Stoker
from stoker.cli import why
from stoker.contract.text import parse_json
from stoker.control.record import follow, reader
from stoker.control.scheduler import slurm_runs
from stoker.training.generate.exporting import card_of

ANOTHER = 12345

# ---- entries that nobody but their owner can look at ----

_MOUNT = """
import ctypes, os, sys
libc, handle = ctypes.CDLL(None, use_errno=True), os.open("/dev/fuse", os.O_RDWR)
options = f"fd={handle},rootmode=40000,user_id=12345,group_id=12345".encode()
if libc.mount(b"theirs", sys.argv[1].encode(), b"fuse", 6, options):
    sys.exit(f"mount: {os.strerror(ctypes.get_errno())}")
os.set_inheritable(handle, True)
os.execvp(sys.argv[2], sys.argv[2:])
"""
_LOOK = """
import sys
from stoker.contract import checkpoints, owners
from stoker.control.doctor import debris
from stoker.control.record import ownership, finder, reader
from stoker.speedrun.state import check_own
from stoker.contract.names import Refusal
from stoker.training.checkpoint import folders, reading
from stoker.training.generate import finding
from stoker.training.model import hf_write

root, theirs = sys.argv[1:]
listing = finder.look(root)
assert listing.others == 1 and not listing.damaged, listing
assert not owners.is_own(theirs) and owners.is_own(root)
debris.FRESH_S = -1.0
assert [entry.name for entry, _ in debris._own_entries(root, debris.re.compile("step-.*"))] == ["step-00000001"]
assert list(folders.steps_in(root)) == [2, 1] and not folders.is_trusted(theirs)
folders.repair(root)
hf_write.sweep(root, "step-00000002")
lines = []
assert reading.find(root, lines.append) is None
assert "can't be read: Permission denied" in lines[0] and "step-00000001 is not a complete" in lines[1], lines
assert checkpoints._trusted(theirs, root, None) is False
assert ownership.own_folder(root, "step-00000002") == theirs + "-0"
assert finding._models(root, "") == []
try:
    check_own(theirs)
except Refusal as refusal:
    assert "not a folder of yours" in refusal.line
else:
    raise AssertionError("not refused")
"""


def beside_anothers_mount(
    theirs: Path, *command: str, cwd: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs the command where a user's FUSE file system is mounted: nobody else may look at it, not even root."""
    if os.getuid() or not os.path.exists("/dev/fuse"):
        pytest.skip("a mount of another user's takes root and /dev/fuse")
    theirs.mkdir(parents=True, exist_ok=True)
    mounting = ("unshare", "-m", sys.executable, "-c", _MOUNT, str(theirs), *command)
    done = subprocess.run(mounting, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False)
    if done.stderr.startswith(("mount:", "unshare:")):
        pytest.skip(f"no FUSE file system can be mounted here: {done.stderr.strip()}")
    return done


def test_what_only_its_owner_can_look_at_is_another_users(tmp_path: Path) -> None:
    root = tmp_path / "shared"
    (root / "step-00000001").mkdir(parents=True)
    theirs = root / "step-00000002"
    done = beside_anothers_mount(theirs, sys.executable, "-c", _LOOK, str(root), str(theirs), cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_anothers_mount_in_a_runs_folder_ends_no_command(stoker: Stoker) -> None:
    stoker.script("ok.py", "print('fine')\n")
    run = f"{sys.executable} -m stoker run --name mine --runs-dir runs --nproc-per-node 1 ok.py"
    looks = [f"{sys.executable} -m stoker {what} --runs-dir runs" for what in ("runs", "why", "why mine")]
    commands = " && ".join([run, *looks])
    done = beside_anothers_mount(
        stoker.cwd / "runs" / "theirs", "bash", "-c", commands, cwd=stoker.cwd, env=stoker.environment()
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Permission denied" not in done.stdout + done.stderr


# ---- another user's events ----


@pytest.fixture
def strangers_run(tmp_path: Path) -> Path:
    """60 MB of events. Its newest is a rank that started."""
    if os.getuid():
        pytest.skip("a folder of another user's takes root")
    run = tmp_path / "runs" / "theirs"
    (run / "attempt-0").mkdir(parents=True)
    (run / "run.json").write_text("{}")
    verdict = {"status": "failed", "cause": "rank.exit", "summary": "s", "exit_code": 1}
    (run / "verdict.json").write_text(json.dumps(verdict))
    (run / "attempt-0" / "rank-0.log").write_text("hello\n")
    newest = {"event": "rank-up", "attempt": 0, "rank": 0, "label": "gpu3"}
    (run / "events.jsonl").write_bytes(b'{"event":"restart"}\n' * 3_000_000 + json.dumps(newest).encode() + b"\n")
    for path in (*run.rglob("*"), run):
        os.chown(path, ANOTHER, ANOTHER)
    return run


def test_of_anothers_events_only_the_last_are_read(strangers_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = 0

    def count(line: bytes, of: Callable[[bytes], dict[str, Any] | None] = reader._event) -> dict[str, Any] | None:
        nonlocal parsed
        parsed += 1
        assert parsed < 100_000, "more than 1 MB is read"
        return of(line)

    monkeypatch.setattr(reader, "_event", count)
    run = reader.read(str(strangers_run))
    assert run is not None and not run.mine
    assert follow.labels(run) == {(0, 0): "gpu3"}
    parsed = 0
    assert why._suspicions(run) == []


def test_restarts_of_another_users_run_are_counted(strangers_run: Path, stoker: Stoker) -> None:
    done = stoker("why", str(strangers_run), timeout=60)
    assert done.code == 0, done.err
    line = next(line for line in done.out.splitlines() if line.startswith("restarts:"))
    assert re.fullmatch(r"restarts: 52\d\d\d in the last 1 MB of its events \(causes: .*, and 52\d\d\d more\)", line), (
        line
    )
    assert len(line) < 500
    done = stoker("attach", str(strangers_run), timeout=60)
    assert done.code == 1 and "gpu3:hello" in done.out.replace(" ", ""), done.out + done.err


def test_all_restarts_of_ones_own_run_are_counted(tmp_path: Path, stoker: Stoker) -> None:
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    (run / "verdict.json").write_text('{"status": "failed", "cause": "rank.exit", "summary": "s", "exit_code": 1}')
    (run / "events.jsonl").write_text('{"event": "restart", "cause": "rank.exit"}\n' * 3 + '{"event": "x"}\n' * 100_000)
    assert "restarts: 3 (causes: rank.exit, rank.exit, rank.exit)" in stoker("why", str(run)).out


# ---- a stranger's metrics ----


@pytest.mark.parametrize("row", ["{}\n", '{"step": 5, "note": "%s"}\n' % ("x" * 500)])
def test_an_export_reads_the_end_of_long_metrics(tmp_path: Path, row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = 0

    def count(text: str) -> Any:
        nonlocal parsed
        parsed += len(text)
        assert parsed <= 16 << 20, "more than 16 MB are parsed"
        return parse_json(text)

    (tmp_path / "config.yaml").write_text("model: {}\n")
    first, last = '{"loss": 9.5, "reward": 1}\n', '{"step": 7, "loss": 2.5}\nhalf a li'
    (tmp_path / "metrics.jsonl").write_text(first + row * ((40 << 20) // len(row)) + last)
    monkeypatch.setattr("stoker.control.record.metrics.parse_json", count)
    card = card_of(str(tmp_path))
    assert "| loss | 2.5 |" in card and "| step | 7 |" in card and "reward" not in card
    assert "Only the end of metrics.jsonl was read" in card
    assert parsed > 200_000


def test_short_metrics_are_read_whole(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: {}\n")
    assert "Result" not in card_of(str(tmp_path))
    (tmp_path / "metrics.jsonl").write_text('{"reward": 1}\n' + "{}\n" * 99_999)
    card = card_of(str(tmp_path))
    assert "| reward | 1 |" in card and "Only the end" not in card


# ---- the name of a stranger's Slurm job ----

_JOB = (
    "JobId=12 JobName={} UserId=ann(12345) GroupId=ann(12345) Priority=1 Account=(null) QOS=normal JobState=FAILED"
    " Reason=NonZeroExitCode Dependency=(null) Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=3:0 RunTime=00:00:01"
    " TimeLimit=01:00:00 ReqNodeList=(null) ExcNodeList=(null) NodeList=n[1-2] Command=/x WorkDir=/y Comment={}"
)


def test_a_jobs_own_words_are_read() -> None:
    job = slurm_runs.read_controller(_JOB.format("a b", "c"))
    assert job is not None
    assert (job.id, job.state, job.exit_code, job.restarts, job.nodes) == ("12", "FAILED", 3, 2, "n[1-2]")


@pytest.mark.parametrize("text", ["a JobState=COMPLETED", "a Restarts=x", "a\nJobId=12 JobState=COMPLETED\nJobId=12 b"])
@pytest.mark.parametrize("where", ["name", "comment"])
def test_a_jobs_name_says_nothing_about_its_state(text: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    line = _JOB.format(text, "c") if where == "name" else _JOB.format("b", text)
    answers = {"scontrol": line + "\n", "sacct": "12|FAILED|3:0|None|n[1-2]|01:00:00\n"}
    monkeypatch.setattr(slurm_runs, "_run", lambda program, *_: answers[program])
    assert slurm_runs.tasks_of("12") == []
    job = slurm_runs.look("12")
    assert job is not None and job.state == "FAILED"
