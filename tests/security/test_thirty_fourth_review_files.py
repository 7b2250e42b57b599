"""What the thirty-fourth review found in folders that strangers packed."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

import pytest

from stoker.contract import layout
from stoker.contract.names import Refusal
from stoker.contract.safe_io import APPEND
from stoker.control.doctor import bundle
from stoker.control.machine.facts import Examination
from stoker.control.machine.model import Machine
from stoker.control.record import finder
from stoker.control.record.history import HistoryWriter, Members, Moment
from stoker.control.record.writer import RunRecord

# ---- pipes and holes in a run that is continued ----


def test_a_launcher_does_not_wait_for_a_pipe_in_the_place_of_its_log(tmp_path: Path) -> None:
    """Neither Ctrl-C nor SIGTERM ended `stoker train … --name` in a folder whose run had stoker.log as a pipe."""
    run = tmp_path / "runs" / "20260101-000000-a"
    run.mkdir(parents=True)
    os.mkfifo(run / layout.CONSOLE)
    with pytest.raises(Refusal, match="can't be written"):
        RunRecord(str(run), "here", reopened=True)


def test_a_rank_whose_log_is_a_pipe_runs_without_one(tmp_path: Path) -> None:
    """attempt-1000000 is the attempt behind the last that is looked for, so it may be there."""
    run = tmp_path / "runs" / "20260101-000000-a"
    folder = run / "attempt-1000000"
    folder.mkdir(parents=True)
    log, stacks = str(folder / "rank-0.log"), str(folder / "stacks.txt")
    os.mkfifo(log)
    os.mkfifo(stacks)
    record = RunRecord(str(run), "here", reopened=True)
    record.output(log, b"step 1\n")
    record.save(stacks, "no stacks")
    assert set(record.lost()) == {log, stacks}


def test_logs_grow_as_before(tmp_path: Path) -> None:
    for line in (b"1\n", b"2\n"):
        handle = os.open(tmp_path / "log", APPEND, 0o644)
        os.write(handle, line)
        os.close(handle)
    assert (tmp_path / "log").read_bytes() == b"1\n2\n"


def test_a_history_of_holes_is_put_aside_and_not_read(tmp_path: Path) -> None:
    """history/seconds.jsonl of 8 TB, nothing of it stored: the launcher read it all, and neither Ctrl-C nor SIGTERM ended it."""
    (tmp_path / "history").mkdir()
    seconds = tmp_path / "history" / "seconds.jsonl"
    seconds.touch()
    os.truncate(seconds, 8 << 40)
    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    lost: list[object] = []
    writer = HistoryWriter(folder, lambda *what: lost.append(what))
    writer.write(Moment(10.0, 0, Members((0,)), {"step": (1,)}, {}, {}))
    writer.close()
    os.close(folder)
    assert not lost
    assert (tmp_path / "history" / "seconds.1.jsonl").stat().st_size == 8 << 40
    assert [json.loads(line)["time"] for line in seconds.read_text().splitlines()] == [10.0, 10.0]


def test_a_bundle_takes_the_end_of_a_runs_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`stoker doctor --bundle` read all of it: of 1 GB, 8.4 GB of memory, and no end in 100 s."""
    run = tmp_path / "20260101-000000-a"
    run.mkdir()
    (run / layout.RUN).write_text('{"schema": 1, "name": "a"}')
    log = run / layout.CONSOLE
    log.write_bytes(b"x" * (5 << 20) + b"\nthe last line\n")
    monkeypatch.setattr(bundle, "COMMANDS", {})
    monkeypatch.setattr(bundle, "_processes", lambda: "")
    bundle.write_bundle(str(tmp_path / "b.tgz"), Examination(Machine("here", 1, 1, 1)), [], str(tmp_path))
    with tarfile.open(tmp_path / "b.tgz") as archive:
        kept = archive.extractfile(f"stoker-doctor/latest-run/{layout.CONSOLE}")
        assert kept is not None
        assert kept.read() == b"(its last 4 MB)\nthe last line\n"


def test_a_record_with_many_names_is_one_runs(tmp_path: Path) -> None:
    """An archive of 19 KB, with one run.json of 15 MB under a hundred names: 6.3 GB in `stoker runs`, `why` and `train --name`."""
    for place, name in enumerate("abc"):
        (tmp_path / name).mkdir()
        for file in (layout.RUN, layout.VERDICT):
            if place:
                os.link(tmp_path / "a" / file, tmp_path / name / file)
            else:
                (tmp_path / name / file).write_text('{"schema": 1, "name": "x", "started": 5}')
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / layout.RUN).write_text('{"schema": 1, "name": "y", "started": 4}')
    found = finder.look(str(tmp_path))
    assert [run.id for run in found.runs] == ["d", "c"]
    assert found.damaged == tuple((name, "run.json is the same file as that of c") for name in "ab")
