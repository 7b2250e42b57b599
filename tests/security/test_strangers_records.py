"""What other users leave in shared folders ends no command, and their records are read within bounds."""

from __future__ import annotations

import json
import os
import re
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
