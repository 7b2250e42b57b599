"""What the thirty-fifth review found in folders that strangers packed."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hostile_files import write_model

from stoker.contract import layout
from stoker.contract.names import Refusal
from stoker.contract.tensorheader import pack_header
from stoker.control.record import finder, reader
from stoker.control.record.metrics import Metrics
from stoker.control.show.folder import RunFolder
from stoker.control.show.gather import Gatherer
from stoker.speedrun import state
from stoker.speedrun.state import Entry
from stoker.training.checkpoint.manifest import Sums, sizes_wrong_in
from stoker.training.generate.finding import Found
from stoker.training.model.hf_files import refuse_holes

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
    listing = finder.look(str(tmp_path))
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
    jobs = finder.look(str(tmp_path)).runs
    assert len(jobs) == 4
    assert sum(len(finder.roles(job)) for job in jobs) == 1


def test_a_run_is_itself_by_every_path_and_after_a_move(tmp_path: Path) -> None:
    """A viewer looks again and again, by whatever path, and a second name outside the runs folder takes nothing from it."""
    run = run_in(tmp_path / "runs", "20260101-000000-a")
    os.link(run / layout.RUN, tmp_path / "backup.json")
    (tmp_path / "other").symlink_to("runs")
    for root in ("runs", "other", "runs"):
        assert len(finder.look(str(tmp_path / root)).runs) == 1
    run.rename(tmp_path / "runs" / "20260101-000001-b")
    assert [found.id for found in finder.look(str(tmp_path / "runs")).runs] == ["20260101-000001-b"]
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


def test_metrics_of_a_resumed_run_are_cut_line_by_line(tmp_path: Path) -> None:
    """All of them were in memory, in five times their bytes."""
    lines = [f'{{"step":{step}}}\n' for step in range(50_000)]
    (tmp_path / layout.METRICS).write_text("".join(lines))
    tracemalloc.start()
    try:
        Metrics(str(tmp_path), resumed_at=40_000).close()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tmp_path / layout.METRICS).read_text() == "".join(lines[:40_000])
    assert peak < 1 << 20


# ---- files of holes, and pipes behind links ----


def test_a_link_within_a_run_leads_to_no_pipe_and_no_holes(tmp_path: Path) -> None:
    """Only the link was looked at, and what it leads to lies in a folder that is not."""
    run = run_in(tmp_path, "20260101-000000-a")
    (run / "deep").mkdir()
    os.mkfifo(run / "deep" / "pipe")
    (run / "deep" / "holes").touch()
    os.truncate(run / "deep" / "holes", 1 << 40)
    (run / "deep" / "log").write_text("as it should be")
    (run / layout.CONSOLE).symlink_to("deep/log")
    (run / layout.PROGRESS).symlink_to("deep/nothing")
    layout.check_entries(str(run), ours_only=True)
    for target, why in (("pipe", "is a named pipe"), ("holes", layout.HOLES)):
        (run / layout.METRICS).symlink_to(f"deep/{target}")
        with pytest.raises(Refusal, match=why):
            layout.check_entries(str(run), ours_only=True)
        (run / layout.METRICS).unlink()


def test_a_checkpoints_file_of_holes_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "rank-0.safetensors").touch()
    os.truncate(tmp_path / "rank-0.safetensors", 32 << 20)
    assert layout.HOLES in sizes_wrong_in(str(tmp_path), {"rank-0.safetensors": Sums(32 << 20, 32 << 20, (0,))})[0]


def test_weights_of_holes_are_not_written_again(tmp_path: Path) -> None:
    """`stoker export` made 3.1 GB of a model of 14 layers that an archive of 4 KB held; more layers, more of the disk."""
    size = 32 << 20
    header = pack_header({"a": ("BF16", (size // 2,))}, {})
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(header)
    os.truncate(weights, len(header) + size)
    with pytest.raises(Refusal, match=layout.HOLES):
        refuse_holes(str(tmp_path))
    weights.write_bytes(header + bytes(size))
    refuse_holes(str(tmp_path))


def test_an_export_looks_for_holes_before_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from stoker.training.generate.exporting import export

    write_model(tmp_path / "model")
    monkeypatch.setattr(layout, "consists_of_holes", lambda about: True)  # a real one has 16 MB of weights at least
    with pytest.raises(Refusal, match=layout.HOLES):
        export(Found(str(tmp_path / "model")), str(tmp_path / "out"), None, None, lambda line: None)
    assert os.listdir(tmp_path) == ["model"]
