"""Attacks that a review found: each of them once worked."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from localuser import ATTACKER, VICTIM, do_as, start_as, wait
from stoker.contract import layout
from stoker.contract.names import Refusal
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
