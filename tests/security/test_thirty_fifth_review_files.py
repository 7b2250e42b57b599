"""What the thirty-fifth review found in folders that strangers packed."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from stoker.contract import layout
from stoker.control.record import reader
from stoker.control.show.folder import RunFolder
from stoker.control.show.gather import Gatherer
from stoker.speedrun import state
from stoker.speedrun.state import Entry

# ---- one file under many names ----


def run_in(place: Path, name: str, **about: Any) -> Path:
    folder = place / name
    folder.mkdir(parents=True)
    (folder / layout.RUN).write_text(json.dumps({"name": name, "started": 1.7e9, **about}))
    return folder


@pytest.mark.parametrize("name", [layout.EVENTS, layout.METRICS])
def test_one_file_counts_for_one_run(tmp_path: Path, name: str) -> None:
    """An archive of 4 KB had events.jsonl of 16 MB in 40 runs: `stoker runs` took 3.6 GB."""
    first = run_in(tmp_path, "20260101-000000-a")
    (first / name).write_text("{}\n")
    for number in range(1, 4):
        os.link(first / name, run_in(tmp_path, f"20260101-00000{number}-a") / name)
    listing = reader.look(str(tmp_path))
    assert len(listing.runs) == 1
    assert [why for _, why in listing.damaged] == [f"{name} is the same file as that of 20260101-000003-a"] * 3


def test_one_file_counts_for_one_role_of_all_jobs(tmp_path: Path) -> None:
    """Each job's roles are a folder of their own: a run.json of 12 MB, in one role of 12 jobs each, was in memory 12 times."""
    first: Path | None = None
    plan = {"ranks": [{"role": "a", "rank": 0}, {"role": "b", "rank": 1}]}
    for number in range(4):
        job = run_in(tmp_path, f"20260101-00000{number}-a", plan=plan)
        if first is None:
            first = run_in(job / layout.ROLES, "role") / layout.RUN
        else:
            (job / layout.ROLES / "role").mkdir(parents=True)
            os.link(first, job / layout.ROLES / "role" / layout.RUN)
    jobs = reader.look(str(tmp_path)).runs
    assert len(jobs) == 4
    assert sum(len(reader.roles(job)) for job in jobs) == 1


def test_a_run_is_itself_by_every_path_and_after_a_move(tmp_path: Path) -> None:
    """A viewer looks again and again, by whatever path, and a second name outside the runs folder takes nothing from it."""
    run = run_in(tmp_path / "runs", "20260101-000000-a")
    os.link(run / layout.RUN, tmp_path / "backup.json")
    (tmp_path / "other").symlink_to("runs")
    for root in ("runs", "other", "runs"):
        assert len(reader.look(str(tmp_path / root)).runs) == 1
    run.rename(tmp_path / "runs" / "20260101-000001-b")
    assert [found.id for found in reader.look(str(tmp_path / "runs")).runs] == ["20260101-000001-b"]
    assert len(Gatherer(str(tmp_path / "runs"), machine=False).snapshot().runs) == 1


# ---- events without end ----


def test_starts_without_end_are_one_number(tmp_path: Path) -> None:
    """Each was kept, in five times its bytes."""
    run = run_in(tmp_path, "20260101-000000-a")
    count = 20_000
    with open(run / layout.EVENTS, "w") as file:
        for number in range(count):
            file.write(f'{{"event":"run","time":{10 * number}}}\n{{"event":"x","time":{10 * number + 2}}}\n')
    record = reader.read(str(run))
    assert record is not None
    folder = RunFolder(record)
    tracemalloc.start()
    try:
        row = folder.run(0.0, watched=False)
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert row.seconds == 2.0 * count
    assert kept < 100_000


def test_a_speedruns_stage_keeps_the_last_restarts(tmp_path: Path) -> None:
    """`stoker speedrun` in a folder with events.jsonl of 32 MB, one file for 14 stages (an archive of 83 KB), took 4.5 GB."""
    run = run_in(tmp_path, "20260101-000000-a")
    with open(run / layout.EVENTS, "w") as file:
        file.writelines(f'{{"event":"restart","time":{number}}}\n' for number in range(5000))
    restarts = state.seen(str(tmp_path), Entry("base", "pretrain", "", run=run.name)).restarts
    assert [restart["time"] for restart in restarts] == list(range(4000, 5000))
