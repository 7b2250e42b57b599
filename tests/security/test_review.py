"""Attacks that a review found: each of them once worked."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conftest import Stoker
from localuser import ATTACKER, VICTIM, do_as, start_as, wait
from stoker.contract import layout
from stoker.contract.names import Refusal
from stoker.control.launch.attempt import Attempt
from stoker.control.launch.options import RunOptions
from stoker.control.launch.reports import Reports
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


# ---- a hostile host ----


@pytest.fixture
def from_evil(stoker: Stoker, tmp_path: Path) -> Callable[[list[dict[str, Any]]], float]:
    """Starts a run on a host that sends these messages once its rank is up; the seconds of CPU time that the run takes."""
    folder = tmp_path / "bin"
    folder.mkdir()
    agent = Path(__file__).with_name("hostile_agent.py")
    (folder / "ssh").write_text(f"#!{sys.executable} -IS\nimport runpy\nrunpy.run_path({str(agent)!r}, run_name='x')\n")
    (folder / "ssh").chmod(0o755)
    stoker.script("ok.py", "print('ran')\n")

    def run(words: list[dict[str, Any]]) -> float:
        (tmp_path / "hostile").write_bytes(b"".join(json.dumps(word).encode() + b"\n" for word in words) + b"the end\n")
        env = {
            "PATH": f"{folder}:{stoker.env['PATH']}",
            "HOSTILE_AT": "start",
            "HOSTILE_FILE": str(tmp_path / "hostile"),
        }
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = stoker(
            "run", "--hosts", "evil.example", "--nproc-per-node", "1", "--no-preflight", "ok.py", env=env, timeout=300
        )
        assert "Traceback" not in done.err and "it is broken" in done.err, done.err
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return run


_EXIT = {"is": "exit", "rank": 0, "code": 1, "time": 1.0, "ours": False, "error": None, "elastic": None, "stack": "", "steps": 0, "core": False,
         "oom_killed": False, "around": None}  # fmt: skip


@pytest.mark.parametrize(
    "word",
    [{**_EXIT, "elastic": ["password=abc1"] * 900_000}, {**_EXIT, "stack": "--token y curl -u a:b " * 700_000}],
    ids=["many texts", "long stack"],
)
def test_one_huge_message_does_not_hold_the_launcher_up(
    from_evil: Callable[[list[dict[str, Any]]], float], word: dict[str, Any]
) -> None:
    assert from_evil([word]) < 20.0


def test_a_host_that_repeats_itself_fills_no_memory() -> None:
    attempt = Attempt(
        0,
        SimpleNamespace(
            places=(SimpleNamespace(rank=0, host="evil", label="evil/CPU0"),),
            hosts=("evil",),
            world_size=1,
            ranks=range(1),
        ),
    )  # type: ignore[arg-type]
    attempt.begin_watch(60.0, 1800.0)
    attempt.watch.groups(";".join(f"{number}{'x' * 1000}=*" for number in range(20_000)))
    assert sum(map(len, attempt.watch._members)) < 10_000_000
    record = SimpleNamespace(event=lambda kind, **more: None)
    run = SimpleNamespace(record=record, output=None, options=RunOptions(), say=lambda line: None)
    reports = Reports(run, attempt)  # type: ignore[arg-type]
    for number in range(3000):
        reports.hear("evil", {"is": "unstarted", "rank": 0, "text": "x"}, b"")
        reports.hear("evil", {"is": "mark", "rank": 0, "name": f"{number}{'x' * 10_000}"}, b"")
        reports.hear("evil", {"is": "mark", "rank": 0, "name": str(number)}, b"")
    assert len(attempt.trouble) < 10 and len(attempt.can) <= 1000 and max(map(len, attempt.can)) <= 200


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
