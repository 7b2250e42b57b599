"""What viewers draw: the snapshot of real runs and recorded folders, the history a coordinator writes, curves and lists."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from conftest import Stoker, wait_for
from stoker.contract.frozen import replace
from stoker.contract.safe_io import write_atomic
from stoker.control.machine.gauges import Gauges, HostMeter
from stoker.control.machine.model import OFFLINE, GpuGauges, HostGauges
from stoker.control.record import history, run_record
from stoker.control.record.history import HistoryPoint, HistoryTail, HistoryWriter, Members
from stoker.control.show import curves
from stoker.control.show.charts import Series, display_width, draw_chart, fit_width, format_short, mean, sparkline
from stoker.control.show.collector import SnapshotCollector
from stoker.control.show.comparison import find_differing_settings, measure_difference
from stoker.control.show.curves import Curve, MetricsTail, read_newest_line
from stoker.control.show.metrics_columns import ColumnBlock, LineFormat
from stoker.control.show.run_tail import EventTail, RunTail
from stoker.control.show.slow_rank import explain_gpu, explain_host, find_late_rank
from stoker.control.show.snapshot import RankView, RunView, Snapshot, snapshot_from_json
from stoker.control.show.top.replay import Replay
from stoker.control.verdict import judge  # noqa: F401 (fills the catalogue)
from stoker.control.verdict.catalogue import CATALOGUE
from stoker.control.watch.straggler import compute_waiting_shares

MACHINES = Path(__file__).parents[2] / "machines"
BEATS = """
import os, sys, time, stoker
for step in range(int(sys.argv[1])):
    stoker.beat(step=step + 1, loss=3.0 / (step + 1))
    time.sleep(0.1)
if len(sys.argv) > 2:
    stoker.phase("eval")
    while not os.path.exists(sys.argv[2]):
        time.sleep(0.05)
"""


def metrics_file(run_dir: Path, losses: list[Any], **more: Any) -> None:
    lines = [
        json.dumps({"schema": 1, "time": 1e9 + step, "step": step, "total_steps": 100, "loss": loss, **more})
        for step, loss in enumerate(losses)
    ]
    (run_dir / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def same_in_json(snapshot: Snapshot) -> Snapshot:
    """No NaN, nothing that JSON has not, and the same when it is read again."""
    again = snapshot_from_json(json.loads(json.dumps(snapshot.to_json(), allow_nan=False)))
    assert again == snapshot
    return snapshot


@pytest.fixture
def finished(stoker: Stoker) -> Stoker:
    """One run of 2 ranks and 3 steps."""
    script = stoker.script("train.py", BEATS)
    assert stoker("run", "--nproc-per-node", "2", "--name", "exp", script, "3").code == 0
    return stoker


# ---- a run that is under way, its history ----


def test_a_running_job_is_seen_with_ranks_cards_and_hosts(stoker: Stoker, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = str(MACHINES / "hot-and-narrow.json")
    monkeypatch.setenv("STOKER_MACHINE", machine)
    script = stoker.script("train.py", BEATS)
    go = stoker.cwd / "go"
    env = {"STOKER_MACHINE": machine}
    job = stoker.start("run", "--nproc-per-node", "2", script, "10", str(go), env=env)
    gatherer = SnapshotCollector(str(stoker.cwd / "runs"))

    def seen() -> Snapshot | None:
        snapshot = same_in_json(gatherer.snapshot())
        ready = snapshot.runs and snapshot.runs[0].phase == "eval" and snapshot.runs[0].ranks[1].memory
        return snapshot if ready else None

    snapshot = wait_for(seen, 60.0)
    go.touch()
    assert job.wait(60) == 0
    (run,) = snapshot.runs
    assert (run.state, run.step, run.loss, run.world, run.attempts) == ("running", 10, 0.3, 2, 1)
    assert [(rank.rank, rank.state, rank.step, rank.phase) for rank in run.ranks] == [
        (n, "running", 10, "eval") for n in (0, 1)
    ]
    assert run.roles[0].ranks == (0, 1) and run.curve[-1] == (10, 0.3) and run.ranks[0].pid
    cards = {card.uuid: card for card in snapshot.gpus}
    hot = cards[run.ranks[0].gpu or ""]
    assert (
        hot.temperature == 92 and hot.throttle == ("hardware thermal slowdown",) and hot.recent["temperature"][-1] == 92
    )
    assert snapshot.hosts[0].cores == 8 and snapshot.hosts[0].state == "OK"
    ended = gatherer.snapshot([run.id]).runs[0]
    assert (ended.state, ended.step) == ("completed", 10)
    assert [rank.state for rank in ended.ranks] == ["ended", "ended"]
    moments = history.read_history(run.dir)
    assert moments[-1].of_rank(1)["step"] == 10 and moments[-1].attempt == 0
    replay = Replay(record := run_record.read_run(run.dir))  # type: ignore[arg-type]
    assert record is not None and len(replay.points) == len(moments)
    last = same_in_json(replay.snapshot(len(moments) - 1)).runs[0]
    first = same_in_json(replay.snapshot(0)).runs[0]
    assert (last.step, last.loss, last.phase, last.state) == (10, 0.3, "eval", "running") and first.ranks[
        0
    ].state == "running"
    assert replay.snapshot(len(moments) - 1).gpus[0].temperature == 92
    where = moments[-1].members.gpus[0]
    assert moments[-1].of_gpu(*where)["throttle"] == ["hardware thermal slowdown"]


def test_a_short_job_has_no_history(finished: Stoker) -> None:
    assert not (finished.latest / "history").exists()


def moment(at: float, ranks: int = 2, attempt: int = 0, **columns: Any) -> HistoryPoint:
    members = Members(tuple(range(ranks)), (("here", "GPU-1"),), ("here",))
    step = {"step": tuple(int(at) for _ in range(ranks)), **columns}
    return HistoryPoint(
        at, attempt, members, step, {"power": (at,), "throttle": (("power cap",) if at == 10 else (),)}, {}
    )


class Folder:
    def __init__(self, path: Path) -> None:
        self.path, self.lost = path, list[Any]()
        self.handle = os.open(path, os.O_RDONLY)

    def writer(self) -> HistoryWriter:
        return HistoryWriter(self.handle, lambda *told: self.lost.append(told))


def test_history_is_bounded_and_thinned_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(history.TIERS, "seconds", (2.0, 50))
    folder = Folder(tmp_path)
    writer, tail, followed = folder.writer(), HistoryTail(str(tmp_path)), []
    for at in range(0, 1000, 2):
        writer.write(moment(float(at)))
        if at % 62 == 0:
            followed += tail.read_new()
    writer.close()
    followed += tail.read_new()
    assert [one.time for one in followed] == [float(at) for at in range(0, 1000, 2)]  # turned over ten times meanwhile
    kept = history.read_history(str(tmp_path))
    assert 50 <= len(kept) <= 100 and kept[-1].time == 998.0
    minutes = history.read_history(str(tmp_path), "minutes")
    assert [one.time for one in minutes[:2]] == [58.0, 118.0]
    assert minutes[0].of_rank(0)["step"] == 58 and minutes[0].of_gpu("here", "GPU-1") == {
        "power": 29.0,
        "throttle": ["power cap"],
    }
    whole = history.read_full_history(str(tmp_path))
    assert [one.time for one in whole] == sorted({one.time for one in whole}) and whole[0].time < kept[0].time
    assert not folder.lost


def test_history_goes_on_after_a_crash_and_a_change_of_members(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    first = folder.writer()
    first.write(moment(2.0))
    path = tmp_path / "history" / "seconds.jsonl"
    with path.open("ab") as file:
        file.write(b'{"schema":1,"time":4.0,"att')  # torn
    second = folder.writer()
    second.write(moment(6.0, ranks=3, attempt=1))
    with path.open("ab") as file:  # of a stranger: no members for so many, not JSON, another version, deep
        file.write(b'{"schema":1,"time":7.0,"attempt":1,"ranks":{"step":[1]},"gpus":{},"hosts":{}}\nnonsense\n')
        file.write(b'{"schema":9,"time":8.0}\n' + b"[" * 50_000 + b"\n")
    read = history.read_history(str(tmp_path))
    assert [(one.time, one.attempt, len(one.members.ranks)) for one in read] == [(2.0, 0, 2), (6.0, 1, 3)]
    assert history.read_newest_columns(str(tmp_path))["step"] == (1,)


def test_a_history_that_cannot_be_written_is_counted(tmp_path: Path) -> None:
    (tmp_path / "history").write_text("a file in its place")
    folder = Folder(tmp_path)
    folder.writer().write(moment(2.0))
    assert folder.lost[0][0] == "history/seconds.jsonl" and isinstance(folder.lost[0][2], OSError)


# ---- folders as they are found ----


def test_damaged_half_written_and_deleted_folders_are_shown_as_they_are(finished: Stoker) -> None:
    root = finished.cwd / "runs"
    good = finished.latest
    for name in ("cut", "no-json", "half", "nan", "gone"):
        shutil.copytree(good, root / name)
    (root / "cut" / "run.json").write_bytes((good / "run.json").read_bytes()[:200])
    (root / "no-json" / "run.json").write_text("[]")
    for name in ("events.jsonl", "verdict.json"):
        (root / "half" / name).write_bytes((good / name).read_bytes()[:-20])
    with (root / "half" / "events.jsonl").open("ab") as events:
        events.write(
            b"\n\xff\xfe\n[1, 2]\n"
            + b'{"event": "rank-exit", "rank": "x", "time": "y"}\n{"event": "attempt", "attempt": {}, "time": 1}\n'
        )
    metrics_file(root / "nan", [5.0, "nan", float("1e400"), 4.0, "inf"], tokens_per_s=10**400)
    (root / "nan" / "history").symlink_to("/etc")
    (root / "empty").mkdir()
    gatherer = SnapshotCollector(str(root))
    snapshot = same_in_json(gatherer.snapshot([name.name for name in root.iterdir()]))
    states = {run.id: run.state for run in snapshot.runs}
    assert states["cut"] == states["no-json"] == "damaged" and "empty" not in states
    assert {states[name] for name in ("half", "nan", "gone")} <= {"completed", "lost"}
    damaged = snapshot.run("cut")
    assert damaged is not None and "not JSON" in damaged.problem
    odd = snapshot.run("nan")
    assert odd is not None and (odd.step, odd.loss, odd.tokens_per_s) == (5, "inf", "inf")
    assert odd.curve == ((0, 5.0), (1, "nan"), (2, "inf"), (3, 4.0), (4, "inf"))
    shutil.rmtree(root / "gone")
    assert gatherer.snapshot(["gone"]).run("gone") is None
    shutil.rmtree(root)
    assert gatherer.snapshot().runs == ()


def test_a_clock_that_was_set_back_gives_no_negative_times(finished: Stoker) -> None:
    events = finished.latest / "events.jsonl"
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    lines[-1]["time"] = 1.0
    events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run,) = SnapshotCollector(str(finished.cwd / "runs")).snapshot().runs
    assert run.seconds == 0.0
    tail = MetricsTail(str(finished.latest))
    metrics_file(finished.latest, [3.0, 2.0, 1.0])
    assert tail.read_new() and tail.step_s == 1.0


def test_a_run_of_the_future_and_of_a_clock_that_jumps_is_shown(stoker: Stoker) -> None:
    """While it runs: all its times lie ten days ahead, and then those of its last events and metrics lie in the past."""
    script, go, root = stoker.script("train.py", BEATS), stoker.cwd / "go", str(stoker.cwd / "runs")
    job = stoker.start("run", "--nproc-per-node", "2", script, "5", str(go))
    ahead = time.time() + 864_000.0

    def shifted(ends: float) -> None:
        """The first half at `ahead`, the second at `ends`."""
        told = {**json.loads((run_dir / "run.json").read_text()), "started": ahead}
        half = len(events) // 2
        moved = [{**event, "time": ahead if at < half else ends} for at, event in enumerate(events)]
        write_atomic(str(run_dir / "events.jsonl"), "".join(json.dumps(event) + "\n" for event in moved))
        write_atomic(str(run_dir / "run.json"), json.dumps(told))
        lines = [
            {"schema": 1, "step": at, "loss": 1.0, "time": when} for at, when in enumerate((ahead, ends, ends - 9))
        ]
        write_atomic(str(run_dir / "metrics.jsonl"), "".join(json.dumps(line) + "\n" for line in lines))
        shutil.rmtree(run_dir / "history", ignore_errors=True)
        (run_dir / "history").mkdir()
        writer = Folder(run_dir).writer()
        for at in (ahead, ends, ends - 9):
            writer.write(replace(moment(3.0), time=at))
        writer.close()

    try:
        wait_for(lambda: any(run.phase == "eval" for run in SnapshotCollector(root).snapshot().runs) or None, 60.0)
        run_dir = stoker.latest
        events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
        for ends in (ahead, 1.0):
            shifted(ends)
            (run,) = same_in_json(SnapshotCollector(root).snapshot()).runs
            assert (run.state, run.step) == ("running", 3) and run.seconds is not None and run.seconds >= 0
            ages = [age for rank in run.ranks for age in (rank.beat_age, rank.step_s) if age is not None]
            assert all(age >= 0 for age in ages) and (run.eta_s is None or run.eta_s >= 0)
            for command in (["runs"], ["top", "--once"], ["top", "--replay", run.id, "--once"], ["plot", run.id]):
                done = stoker(*command, env={"COLUMNS": "200"})
                shown = [word for word in done.out.split() if re.fullmatch(r"-\d.*", word)]
                assert done.code == 0 and done.out and not done.err and not shown, done.out + done.err
    finally:
        go.touch()
        job.wait(60)
    assert "Traceback" not in stoker("runs").err and stoker("why").code == 0


def test_the_step_is_of_the_ranks_that_still_run(finished: Stoker) -> None:
    """Rank 0 is through with its 3 steps, the others have made 2 and 1."""
    run_dir = finished.latest
    (run_dir / "verdict.json").unlink()
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    kept = [one for one in events if one["event"] != "end" and not (one["event"] == "rank-exit" and one["rank"])]
    (run_dir / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in kept))
    folder = Folder(run_dir)
    folder.writer().write(moment(1.0, 3, step=(3, 2, 1)))
    record = run_record.read_run(str(run_dir))
    assert record is not None
    assert RunTail(record).view(2.0, watched=False).step == RunTail(record).view(2.0, watched=True).step == 1


def recipe_run(finished: Stoker, name: str, logged: float, moment_at: float, verdict: bool = False) -> RunTail:
    """A recipe's run whose ranks have not ended: 21 steps in its metrics since `logged`, none in its history's moment."""
    run_dir = finished.cwd / "runs" / name
    shutil.copytree(finished.latest, run_dir)
    if not verdict:
        (run_dir / "verdict.json").unlink()
    about = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps({**about, "script": "stoker.training.recipes.grpo"}))
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    kept = [one for one in events if one["event"] not in ("end", "rank-exit", "verdict")]
    (run_dir / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in kept))
    line = {"schema": 1, "time": logged, "step": 20, "total_steps": 60, "loss": 1.0}
    (run_dir / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    Folder(run_dir).writer().write(moment(moment_at, 2, step=(0, 0)))
    record = run_record.read_run(str(run_dir))
    assert record is not None
    return RunTail(record)


def test_ranks_have_made_the_steps_that_the_run_has_made(finished: Stoker) -> None:
    """The history is written every two seconds, the metrics more often: `top` must not show step 21 above and 0 below."""
    run = recipe_run(finished, "fresh", logged=100.5, moment_at=100.0).view(101.0, watched=True)
    assert run.step == 21 and [rank.step for rank in run.ranks] == [21, 21]


def test_a_rank_that_hangs_is_behind_the_run(finished: Stoker) -> None:
    """A moment of the history that is younger than the metrics knows better where the other ranks are."""
    run = recipe_run(finished, "hanging", logged=100.5, moment_at=130.0).view(131.0, watched=True)
    assert run.step == 21 and [rank.step for rank in run.ranks] == [21, 0]


def test_ranks_of_a_run_that_was_stopped_have_not_failed(stoker: Stoker) -> None:
    script = stoker.script("train.py", BEATS)
    child = stoker.start("run", "--nproc-per-node", "2", "--name", "endless", script, "100000")
    try:
        runs = stoker.cwd / "runs"
        steps = lambda: any("first-step" in one.read_text() for one in runs.glob("2*/events.jsonl")) or None  # noqa: E731
        assert wait_for(steps, 60)
        assert stoker("stop", "endless").code == 0
        assert child.wait(60) == 128 + signal.SIGTERM
    finally:
        child.terminate()
        child.wait(60)
    record = run_record.read_run(str(stoker.latest))
    assert record is not None
    run = RunTail(record).view(time.time(), watched=True)
    assert run.state == "stopped" and {rank.exit_code for rank in run.ranks} == {-signal.SIGTERM}
    assert {rank.state for rank in run.ranks} == {"stopped"}
    shown = stoker("top", "--once", "endless").out
    assert re.search(r"^ +0 CPU0 +stopped ", shown, re.M) and "exit -15" not in shown, shown


def test_only_what_is_new_is_read(tmp_path: Path) -> None:
    metrics_file(tmp_path, [1.0 / (step + 1) for step in range(100_000)])
    tail = MetricsTail(str(tmp_path))
    assert tail.read_new() and len(tail.curves["loss"].steps) == 100_000 and not tail.read_new()
    before = tail._offset
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 100000, "loss": 7.0}\n{"step": 100001, "lo')
    assert tail.read_new() and tail.newest["loss"] == 7.0 and tail._offset == before + 30
    points = tail.curves["loss"].points(300)
    assert len(points) <= 320 and points[0] == (0, 1.0) and points[-1] == (100_000, 7.0)
    (tmp_path / "metrics.jsonl").unlink()
    metrics_file(tmp_path, [9.0])  # resumed: replaced as a whole
    assert tail.read_new() and list(tail.curves["loss"].values) == [9.0]
    assert read_newest_line(str(tmp_path))["loss"] == 9.0


def test_lines_cut_into_columns_are_what_json_makes_of_them(tmp_path: Path) -> None:
    """json.dumps leaves a space after a comma; without them every line is read as JSON."""
    draw = random.Random(3)
    told: list[Any] = []
    for step in range(6000):
        line: dict[str, Any] = {"schema": 1, "time": 1e9 + step, "step": step}
        line |= {"loss": draw.choice([3, -2.5, 1e-7, 4e30]) * draw.random()}
        line |= {"tokens": 512 * step, "mfu": None if step < 3000 else 0.4, "memory": None}
        told.append(line)
        if step % 500 == 499:  # a validation repeats its step
            told.append({**line, "val_loss": 2.0})
        if step % 1000 == 998:
            told.append({**line, "loss": "nan", "step": step})
    told += [{**line, "loss": 8.0} for line in told[2000:2100]]  # steps that come again
    odd = ['{"torn', "1,2", '{"step": 9e99, "loss": 1}', "[1]", '{"step": 7, "loss": true, "time": -1}', "", "\x00"]
    tails = []
    for name, separators in (("spaced", (", ", ": ")), ("dense", (",", ":"))):
        lines = [json.dumps(line, separators=separators) for line in told]
        for at, text in enumerate(odd):
            lines.insert(700 * at, text)
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 6001, "lo')
        tails.append(MetricsTail(str(tmp_path / name)))
    spaced, dense = tails
    assert spaced.read_new() and dense.read_new()
    assert {name for name in spaced.curves} == {"loss", "tokens", "mfu", "val_loss"}
    assert (spaced.newest, spaced.step, spaced.time) == (dense.newest, dense.step, dense.time)
    assert (spaced.times, spaced.step_s) == (dense.times, dense.step_s)
    pairs = [(spaced.curves[name], dense.curves[name]) for name in spaced.curves] + [(spaced.clock, dense.clock)]
    for one, other in pairs:
        assert one.steps == other.steps and repr(one.values) == repr(other.values)
        assert one.find_non_finite_steps() == other.find_non_finite_steps()
    read = list(LineFormat().read((tmp_path / "spaced" / "metrics.jsonl").read_bytes().rpartition(b"\n")[0] + b"\n"))
    assert sum(len(part.steps) for part in read if isinstance(part, ColumnBlock)) > 5000


def test_a_viewer_that_needs_the_newest_values_alone_reads_no_more(finished: Stoker) -> None:
    metrics_file(finished.latest, [5.0] * 10_000 + [4.0], tokens_per_s=7)
    (run,) = SnapshotCollector(str(finished.cwd / "runs"), whole_curves=False).snapshot([finished.latest.name]).runs
    assert (run.step, run.loss, run.tokens_per_s) == (10_001, 4.0, 7) and 0 < len(run.curve) < 500


def test_finished_runs_are_not_read_again(finished: Stoker, monkeypatch: pytest.MonkeyPatch) -> None:
    root = finished.cwd / "runs"
    for number in range(20):
        shutil.copytree(finished.latest, root / f"copy-{number}")
    gatherer = SnapshotCollector(str(root), machine=False)
    assert len(gatherer.snapshot().runs) == 21
    opened: list[str] = []
    monkeypatch.setattr("stoker.contract.safe_io.open_below", lambda *names: opened.append(str(names)))
    assert len(gatherer.snapshot().runs) == 21 and opened == []


# ---- who is slow, and why ----


def rank(number: int, **more: Any) -> RankView:
    return RankView(
        number, "main", number, f"GPU{number}", more.pop("host", "here"), f"GPU-{number}", state="running", **more
    )


def test_the_slow_rank_its_card_and_what_the_others_wait(finished: Stoker) -> None:
    from stoker.control.show.slow_rank import find_slow_ranks

    record = run_record.load_run(str(finished.latest))
    assert record is not None
    folder = RunTail(record)
    ranks = tuple(rank(n, waiting=0.05 if n == 2 else 0.43, step_s=2.1) for n in range(4))
    run = RunView("exp", "exp", "", "me", True, "running", 1.0, ranks=ranks)
    cards = [GpuGauges(n, f"GPU-{n}", host="here", throttle=("power cap",)) for n in range(4)]
    cards[2] = replace(cards[2], throttle=("power cap", "hardware thermal slowdown"), temperature=93)
    (slow,) = find_slow_ranks(run, folder, [HostGauges("here", cpu=1.0)], cards)
    assert (slow.rank, slow.gpu, slow.cause) == (2, "GPU-2", "slow.throttle")
    why = "its GPU's clock is held down: hardware thermal slowdown at 93 °C"
    assert slow.summary == f"rank 2 (GPU 2) is slow because {why}; the others wait 0.9 s of each 2.1 s step"
    (unknown,) = find_slow_ranks(run, folder, [HostGauges("here", cpu=1.0)], [])  # all ranks share that host
    assert unknown.cause == "slow.unknown"
    folder.events.slow[2] = {
        "cause": "slow.data",
        "time": 5.0,
        "wait_s": 0.5,
        "step_s": 1.0,
        "summary": "rank 2 (GPU 2) is slow because it waits for its data loader; the others wait 0.5 s of each 1 s step",
    }
    (told,) = find_slow_ranks(run, folder, [], [])
    assert (told.cause, told.because, told.wait_s, told.since) == (
        "slow.data",
        "it waits for its data loader",
        0.5,
        5.0,
    )


def test_a_straggler_that_keeps_up_again_is_shown_no_longer(tmp_path: Path) -> None:
    events = EventTail(str(tmp_path))
    events.apply({"event": "straggler", "time": 5.0, "rank": 2, "cause": "slow.data", "summary": "rank 2 is slow"})
    events.apply({"event": "straggler-over", "time": 6.0, "rank": 1, "summary": "rank 1 is no longer slow"})
    assert events.suspicion is not None and list(events.slow) == [2]
    events.apply({"event": "straggler-over", "time": 7.0, "rank": 2, "summary": "rank 2 is no longer slow"})
    assert events.suspicion is None and not events.slow


@pytest.mark.parametrize(
    ("gauges", "cause"),
    [
        ({"pressure_io": 0.8, "disk_read": 2e8}, "slow.disk"),
        ({"pressure_memory": 0.6}, "slow.memory"),
        ({"cpu": 0.99, "cores": 8}, "slow.cpu"),
        ({"received": 1.2e9, "sent": 1.0, "link": 1.25e9}, "slow.network"),
        ({"cpu": 0.5}, ""),
    ],
)
def test_a_host_is_blamed_for_what_the_others_have_not(gauges: dict[str, Any], cause: str) -> None:
    others = [HostGauges("b", cpu=0.1, pressure_io=0.0, pressure_memory=0.0, received=1.0, link=1.25e9)]
    found, because = explain_host(HostGauges("a", **gauges), others)
    assert found == cause and ("its host a" in because) == bool(cause)
    assert not cause or cause in CATALOGUE, "docs/verdicts.md says what to do"
    assert explain_host(HostGauges("a", **gauges), [HostGauges("b", **gauges)]) == ("", "")


def test_nobody_is_late_where_all_wait_alike_or_somebody_is_unknown() -> None:
    assert find_late_rank([rank(0, waiting=0.3), rank(1, waiting=0.31)]) is None
    assert find_late_rank([rank(0, waiting=0.01), rank(1, waiting=0.31), rank(2)]) is None
    assert (
        explain_gpu(
            GpuGauges(0, "a", pcie_width=4, pcie_width_max=16), [GpuGauges(1, "b", pcie_width=16, pcie_width_max=16)]
        )
        != ""
    )


def test_shares_of_waiting_from_the_times_of_entry() -> None:
    """Steps of 1 s; rank 1 enters 0.4 s later than rank 0. A rank that runs ahead is in several at once, and waits once."""
    second = 10**9
    early = [["0", n, n * second, "gloo"] for n in range(11)]
    late = [["0", n, n * second + 4 * second // 10, "gloo"] for n in range(11)]
    assert compute_waiting_shares({0: early, 1: late}) == {0: 0.4, 1: 0.0}
    ahead = [["0", n, n * second // 100, "nccl"] for n in range(11)]
    assert compute_waiting_shares({0: ahead, 1: late}) == {0: 1.0, 1: 0.0}
    assert compute_waiting_shares({0: early}) == {}


def test_this_host_is_read_and_a_recorded_card_in_base_units(tmp_path: Path) -> None:
    meter = HostMeter(str(tmp_path / "not" / "there"))
    meter.read()
    time.sleep(0.02)
    here = meter.read()
    assert here.memory_total and here.disk_free and here.disk_total and (here.cpu is None or 0 <= here.cpu <= 1)
    _, cards = Gauges(str(MACHINES / "hot-and-narrow.json")).read()
    assert cards[1].utilization == 0.95 and cards[1].throttle == ("power cap",)
    gatherer = SnapshotCollector(str(tmp_path))
    away = HostGauges("away", state=OFFLINE, reason="connection refused"), ()
    snapshot = same_in_json(gatherer.snapshot(elsewhere=[away]))
    assert snapshot.host("away") == replace(away[0], recent=snapshot.hosts[1].recent)


# ---- text ----


def test_charts_and_sparklines_are_as_wide_as_asked() -> None:
    line = Series("a", tuple((float(x), math.exp(-x / 30)) for x in range(100)))
    for width in (20, 80, 200):
        rows = draw_chart([line], width, 10)
        assert len(rows) == 12 and all(display_width("".join(text for text, _ in row)) <= width for row in rows)
    letters = "".join(text for row in draw_chart([line, line], 80, 5) for text, _ in row)
    assert "b" in letters and not any(0x2800 <= ord(sign) < 0x2900 for sign in letters)
    assert draw_chart([Series("a", ((1.0, -1.0),))], 80, 5, log=True) == [] and draw_chart(
        [Series("a", ((1.0, 2.0),))], 80, 5
    )
    assert sparkline([1.0, 2.0, None, 3.0]) == "▁▅·█" and len(sparkline([float(x) for x in range(1000)], 40)) == 40
    assert sparkline([2.0, 2.0]) == "▅▅" and sparkline([]) == "" and sparkline([math.nan]) == "·"
    assert [format_short(value) for value in (None, "nan", 0, 3.14159, 1234567, 0.00001, 1e300)] == [
        "n/a",
        "nan",
        "0",
        "3.142",
        "1.23M",
        "1.0e-05",
        "1.00e+300",
    ]
    assert fit_width("訓練する", 5) == "訓練…" and display_width("e\u0301") == 1


def test_runs_fit_the_width_and_are_filtered_sorted_and_limited(finished: Stoker) -> None:
    for name, losses in (("low", [3.0, 1.0]), ("high", [3.0, 2.5]), ("bad", [3.0, "nan"])):
        shutil.copytree(finished.latest, finished.cwd / "runs" / name)
        metrics_file(finished.cwd / "runs" / name, losses, tokens_per_s=34567.0)
    for width in (20, 60, 100):
        done = finished("runs", env={"COLUMNS": str(width)})
        assert done.code == 0 and all(len(line) <= width for line in done.out.splitlines()), done.out
    whole = finished("runs").out
    assert "2/100" in whole and "nan" in whole and "34.6K" in whole and "completed" in whole

    def ids(*args: str) -> list[str]:
        return [row["run"] for row in json.loads(finished("runs", "--json", *args).out)["runs"]]

    first = finished.latest.name
    assert ids("--sort", "loss") == [first, "bad", "low", "high"] or ids("--sort", "loss") == [
        "bad",
        first,
        "low",
        "high",
    ]
    assert ids("--sort=-loss", "--limit", "1") == ["low"]
    assert ids("--filter", "loss<2") == ["low"] and ids("--filter", "state=completed", "--filter", "high") == ["high"]
    assert json.loads(finished("runs", "--json", "--filter", "low").out)["runs"][0]["tokens_per_s"] == 34567.0
    for args, word in (
        (["--sort", "los"], "did you mean loss"),
        (["--filter", "loss<x"], "not a number"),
        (["--limit", "0"], "of at least 1"),
        (["--filter", "colour=1"], "unknown column"),
    ):
        refused = finished("runs", *args)
        assert refused.code == 64 and word in refused.err and refused.err.count("\n") == 1
    assert finished("runs", "--filter", "nothing-like-it").out == "no run matches the filter (4 runs in all)\n"


def test_the_list_counts_steps_made_not_the_last_line_of_the_metrics(finished: Stoker) -> None:
    """`stoker train` writes a line for every tenth step or so; its ranks tell of every one."""
    runs = finished.cwd / "runs"

    def recorded(name: str, script: str) -> Path:
        shutil.copytree(finished.latest, runs / name)
        about = json.loads((runs / name / "run.json").read_text())
        (runs / name / "run.json").write_text(json.dumps({**about, "script": script}))
        metrics_file(runs / name, [5.0])
        return runs / name

    resumed = recorded("resumed", "stoker.training.recipes.sft")
    (resumed / "checkpoints" / "step-00000025").mkdir(parents=True)
    (resumed / "checkpoints" / "step-00000025" / "manifest.json").write_text("{}")
    (resumed / "checkpoints" / "step-00000030.half-1.tmp").mkdir()
    later = [{"event": "attempt", "attempt": 1}, {"event": "rank-exit", "rank": 0, "code": -2, "steps": 0}]
    with open(resumed / "events.jsonl", "a") as events:
        events.writelines(json.dumps({"schema": 1, "time": time.time(), **event}) + "\n" for event in later)
    recorded("ended", "stoker.training.recipes.sft")
    killed = recorded("killed", "stoker.training.recipes.sft")
    (killed / "events.jsonl").write_text("")
    (killed / "history").mkdir(exist_ok=True)
    moment = {"schema": 1, "time": 1e9, "attempt": 0, "ranks": {"step": [7, 7]}, "gpus": {}, "hosts": {}}
    (killed / "history" / "seconds.jsonl").write_text(json.dumps(moment) + "\n")
    recorded("own", "train.py")  # what steps are in its metrics, its author knows
    listed = {row["run"]: row["step"] for row in json.loads(finished("runs", "--json").out)["runs"]}
    listed.pop(finished.latest.name)
    assert listed == {"resumed": 25, "ended": 3, "killed": 7, "own": 1}
    assert re.search(r"^ended .* 3/100 ", finished("runs").out, re.M)
    assert re.search(r"^steps +3 +25$", finished("compare", "ended", "resumed").out, re.M)


def test_of_grpo_the_list_has_the_reward(finished: Stoker) -> None:
    assert "REWARD" not in finished("runs").out
    metrics_file(finished.latest, [1.4e-07], reward=0.4375)
    head, row = finished("runs").out.splitlines()
    assert "REWARD" in head and "LOSS" not in head and " 0.4375 " in row and "e-07" not in row
    assert json.loads(finished("runs", "--json").out)["runs"][0]["reward"] == 0.4375
    assert finished("runs", "--filter", "reward<0.4").out == "no run matches the filter (1 run in all)\n"


def rewards(run_dir: Path, count: int) -> None:
    lines = [
        {"schema": 1, "time": 1e9 + step, "step": step, "loss": 1e-7, "length": 30.0, "cut": 0.25, "entropy": 2.0}
        | {"reward": step / count, "kl": step / 1000, "tokens_per_s": 5.0}
        for step in range(count)
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_reward_is_the_headline_of_a_grpo_run(finished: Stoker) -> None:
    rewards(finished.latest, 40)
    drawn = finished("plot", env={"PYTHONIOENCODING": "utf-8"}).out
    assert drawn.startswith("reward\n") and "highest 0.975" in drawn
    assert [line.split()[0] for line in drawn.splitlines()[-4:]] == ["KL", "entropy", "length", "truncated"]
    told = json.loads(finished("plot", "--json").out)
    assert told["metric"] == "reward" and len(told["runs"][0]["points"]) == 40, "every step is a point"
    shown = finished("top", "--once", "exp").out
    (numbers,) = [line for line in shown.splitlines() if line.startswith("step ")]
    places = [numbers.index(word) for word in ("reward 0.975", "KL ", "entropy ", "length ", "truncated 25%", "loss ")]
    assert places == sorted(places) and "0.975 │" in shown, "the curve is the reward's"
    head = finished("runs").out.splitlines()[0].split()
    assert head[head.index("REWARD") :][:5] == ["REWARD", "KL", "ENTROPY", "LENGTH", "TRUNCATED"] and "LOSS" not in head
    exported = finished("metrics", "--once").out
    others = re.findall(r'^stoker_training_metric\{[^}]*metric="(\w+)"', exported, re.M)
    assert others == ["reward", "kl", "entropy", "length", "cut"]


def test_a_picture_of_a_grpo_run_has_its_reward_and_what_goes_with_it(finished: Stoker) -> None:
    pytest.importorskip("matplotlib")
    rewards(finished.latest, 40)
    for name, words in (("all.png", ()), ("one.png", ("--metric", "reward"))):
        assert finished("plot", "exp", "--png", name, *words).code == 0
    height = {name: int.from_bytes((finished.cwd / name).read_bytes()[20:24], "big") for name in ("all.png", "one.png")}
    assert height["all.png"] > 1.5 * height["one.png"], "panels below each other"


def test_plot_in_the_terminal_as_json_and_refusals(finished: Stoker) -> None:
    runs = finished.cwd / "runs"
    shutil.copytree(finished.latest, runs / "odd")
    metrics_file(runs / "odd", [5.0, "nan", 4.0, 3.0], val_loss=9.0)
    drawn = finished("plot", "odd", "--width", "60", "--height", "8", env={"PYTHONIOENCODING": "utf-8"})
    assert drawn.code == 0 and "1 of 4 values are not finite (step 1)" in drawn.out and "last 3, lowest 3" in drawn.out
    plain = finished("plot", "odd", "odd", "--log", "--smooth", "2", env={"PYTHONIOENCODING": "ascii"})
    assert plain.code == 0 and plain.out.isascii()
    told = json.loads(finished("plot", "odd", "--json").out)
    assert told["runs"][0]["points"] == [[0, 5.0], [1, "nan"], [2, 4.0], [3, 3.0]]
    for args, word in (
        (["odd", "--metric", "los"], "did you mean loss?); it has loss, total_steps, val_loss"),
        ([finished.latest.name], "has no metrics"),
        (["nobody"], "no run 'nobody'"),
        (["odd", "--height", "0"], "from 1 to"),
    ):
        refused = finished("plot", *args)
        assert refused.code in (64, 66) and word in refused.err and refused.err.count("\n") == 1, refused.err


def test_a_picture_is_written_whole_or_refused_in_one_line(finished: Stoker) -> None:
    shutil.copytree(finished.latest, finished.cwd / "runs" / "odd")
    metrics_file(finished.cwd / "runs" / "odd", [5.0, 4.0, 3.0])
    (finished.cwd / "none").mkdir()
    (finished.cwd / "none" / "matplotlib.py").write_text("raise ImportError('none here')")
    path = os.pathsep.join(filter(None, (str(finished.cwd / "none"), finished.env.get("PYTHONPATH"))))
    refused = finished("plot", "odd", "--png", "x.png", env={"PYTHONPATH": path})
    assert refused.code == 69 and "(none here)" in refused.err and refused.err.count("\n") == 1
    assert finished("plot", "odd", env={"PYTHONPATH": path}).code == 0
    pytest.importorskip("matplotlib")
    assert finished("plot", "odd", "--png", "x.png").code == 0
    assert (finished.cwd / "x.png").read_bytes().startswith(b"\x89PNG")
    assert "can't be written" in finished("plot", "odd", "--png", "no/such/x.png").err


def curve(values: list[float]) -> Curve:
    made = Curve()
    for step, value in enumerate(values):
        made.add(step, value)
    return made


def test_a_difference_is_more_than_noise_or_not() -> None:
    wave = [4.0 / (1 + step / 50) + 0.1 * math.sin(step * 2.7) for step in range(500)]
    better = [value - 0.05 for value in wave]
    other = [4.0 / (1 + step / 50) + 0.1 * math.sin(step * 1.3 + 1) for step in range(500)]
    found = measure_difference(curve(wave), curve(better))
    assert (
        found is not None
        and found.is_beyond_noise
        and found.difference == pytest.approx(-0.05)
        and found.first_step == 400
    )
    level = measure_difference(curve(wave), curve(other))
    assert level is not None and level.low is not None and not level.is_beyond_noise
    few = measure_difference(curve(wave[:3]), curve(other[:3]))
    assert few is not None and few.low is None
    assert (
        measure_difference(curve(wave), Curve()) is None and measure_difference(curve([math.nan]), curve(wave)) is None
    )
    assert find_differing_settings([{"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"}]) == [
        ("b", ("2", "3")),
        ("c", ("n/a", "4")),
    ]


def test_compare_two_runs(finished: Stoker) -> None:
    runs = finished.cwd / "runs"
    for name, shift, rate in (("a", 0.0, 0.001), ("b", -0.5, 0.01)):
        shutil.copytree(finished.latest, runs / name)
        metrics_file(runs / name, [4.0 / (1 + step / 50) + shift for step in range(200)])
        (runs / name / "config.yaml").write_text(f"optim:\n  learning_rate: {rate}\n  kind: adamw\n")
    done = finished("compare", "a", "b")
    assert done.code == 0 and "optim.learning_rate  0.001  0.01" in done.out and "kind" not in done.out, done.out
    assert "more than noise; b is lower" in done.out
    told = json.loads(finished("compare", "a", "b", "--json").out)
    assert told["settings"] == {"optim.learning_rate": ["0.001", "0.01"]} and told["noise"]["beyond"] is True
    same = finished("compare", "b", str(runs / "b"))
    assert same.code == 64 and "are the same run, b;" in same.err and not same.out
    wide = finished("compare", "a", "b", env={"COLUMNS": "60"}).out
    assert "loss, mean of the last tenth " in wide and "…" not in wide, "there is room for all of it"
    none = finished("compare", finished.latest.name, "a")
    assert none.code == 0 and "too few values at equal steps" in none.out
    about = finished("compare", "--help").out.partition("How noise")[2]
    assert about and "\n " not in about.partition("\n\n")[0], "a paragraph, not a list"


def test_compare_shows_other_data_and_another_stage(finished: Stoker) -> None:
    runs = finished.cwd / "runs"
    for name, stage, data, prepared in (
        ("a", "sft", "x.jsonl", "1" * 32),
        ("b", "sft", "x.jsonl", "2" * 32),
        ("c", "midtrain", "x.jsonl", "1" * 32),
    ):
        shutil.copytree(finished.latest, runs / name)
        (runs / name / "config.yaml").write_text(f"data:\n  path: {data}\n")
        about = json.loads((runs / name / "run.json").read_text())
        about["script"] = f"stoker.training.recipes.{stage}"
        about["contents"] = [["the prepared data", prepared], [f"data.path {data}", "3" * 64]]
        (runs / name / "run.json").write_text(json.dumps(about))
    other_data = json.loads(finished("compare", "a", "b", "--json").out)["settings"]
    assert list(other_data.values()) == [["1" * 12, "2" * 12]] and "prepared data" in next(iter(other_data))
    assert json.loads(finished("compare", "a", "c", "--json").out)["settings"] == {"stage": ["sft", "midtrain"]}


def test_compare_shows_a_script_that_changed(stoker: Stoker) -> None:
    for name, text in (("a", "print(1)"), ("b", "print(2)")):
        stoker.script("same.py", text)
        assert stoker("run", "--name", name, "same.py").code == 0
    assert list(json.loads(stoker("compare", "a", "b", "--json").out)["settings"]) == ["digest of script"]


def test_runs_of_different_length_are_compared_at_equal_steps(finished: Stoker) -> None:
    runs = finished.cwd / "runs"
    for name, count in (("short", 40), ("long", 100)):
        shutil.copytree(finished.latest, runs / name)
        metrics_file(runs / name, [100.0 - step for step in range(count)])
    told = json.loads(finished("compare", "short", "long", "--json").out)
    assert told["at_equal_step"] == {"loss": {"step": 39, "values": [61.0, 61.0]}}
    assert [one["last loss"] for one in told["results"]] == [61.0, 1.0], "the ends, too"
    assert re.search(r"^loss, both at step 39 +61 +61$", finished("compare", "short", "long").out, re.M)


def test_a_name_of_several_runs_means_the_newest_and_says_so(finished: Stoker) -> None:
    first = finished.latest
    newer = finished("run", "--name", "exp", "train.py", "4").run_dir
    assert newer != first
    metrics_file(newer, [3.0, 2.0])
    line = f"stoker: 2 runs have the name exp; using the newest, {newer.name}\n"
    for command in (["why", "exp"], ["plot", "exp"], ["top", "exp", "--once"], ["compare", "exp", first.name]):
        done = finished(*command)
        assert done.code == 0 and done.err == line, (command, done.err)
    assert line in finished("logs", "exp").err
    itself = finished("compare", "exp", newer.name)
    assert itself.code == 64 and line in itself.err and f"exp and {newer.name} are the same run" in itself.err
    once = finished("plot", "exp", "latest")
    assert once.code == 0 and "is named twice; plotting it once" in once.err and once.out.count("; step ") == 1
    for told in (newer.name, str(newer), "latest"):
        assert "is the name of" not in finished("why", told).err


def test_the_end_of_a_training_shows_its_loss(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from stoker.control.show.charts import show_loss

    said: list[str] = []
    show_loss(str(tmp_path), said.append)
    assert said == []
    metrics_file(tmp_path, [3.0, "nan", 2.0, 1.0])
    show_loss(str(tmp_path), said.append)
    assert said[0].startswith("loss █▅▁ 3 to 1 (1 not finite); ") and (tmp_path / "loss.png").exists()
    rewards = [{"step": step, "loss": 0.0, "reward": reward} for step, reward in enumerate((0.1, 0.5, 0.9))]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rewards))
    show_loss(str(tmp_path), said.append)
    assert said[1].startswith("reward ▁▅█ 0.1 to 0.9; ") and (tmp_path / "reward.png").exists()


def test_viewers_load_nothing_heavy() -> None:
    code = "import sys, stoker.control.show.collector, stoker.cli.runs, stoker.cli.plot; print([m for m in ('torch', 'numpy', 'matplotlib', 'textual', 'yaml') if m in sys.modules])"
    import sys

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_all_metrics_of_a_run_are_kept(tmp_path: Path) -> None:
    """A script may log the norm of every layer's gradient, some of them in every tenth line only."""
    names = [f"grad_norm/layer{layer}" for layer in range(300)]
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for step in range(100):
            more = dict.fromkeys(names, 0.5) if step % 10 == 0 else {}
            file.write(json.dumps({"step": step, "time": 1e9, "loss": 1.0, **more}) + "\n")
    tail = MetricsTail(str(tmp_path))
    assert tail.read_new() and len(tail.curves) == 301
    assert len(tail.curves["loss"].steps) == 100 and len(tail.curves[names[-1]].steps) == 10


def test_a_reader_of_newest_values_keeps_no_long_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's list may be open for weeks."""
    monkeypatch.setattr(curves, "NEWEST_BYTES", 4096)
    monkeypatch.setattr(curves, "_MAX_NEWEST", 8192)
    path, tail, longest = tmp_path / "metrics.jsonl", MetricsTail(str(tmp_path), newest_only=True), 0
    for look in range(40):
        with path.open("a") as file:
            file.writelines(f'{{"step": {100 * look + place}, "time": 1.0, "loss": 2.5}}\n' for place in range(50))
        assert tail.read_new() and tail.step == 100 * look + 49 and tail.newest["loss"] == 2.5
        longest = max(longest, len(tail.curves["loss"].steps), len(tail.clock.steps))
    assert 50 < longest < 400, "of 2,000 points"
    whole = MetricsTail(str(tmp_path))
    assert whole.read_new() and len(whole.curves["loss"].steps) == 2000


# ---- numbers that no float holds, and the largest ones ----


def test_numbers_beyond_every_float_are_shown(finished: Stoker) -> None:
    huge = 10**400
    members = {"members": {"ranks": [0, 1], "gpus": [], "hosts": ["h"]}}
    columns = {"ranks": {"memory": [huge, 1], "step": [huge] * 2, "loss": [huge, 1]}, "hosts": {"heard": [huge]}}
    moment = {"attempt": 0, "gpus": {}, **columns}
    folder = finished.latest / "history"
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps({"schema": 1, "time": 1e9, **line}) + "\n" for line in (members, moment))
    (folder / "seconds.jsonl").write_text(text)
    metrics_file(finished.latest, [1.0, huge, 2.0])
    for words in (("top", "--once"), ("top", "--json"), ("metrics", "--once"), ("runs",), ("plot",)):
        done = finished(*words)
        assert done.code == 0 and "Traceback" not in done.err, (words, done.err)


def test_the_largest_numbers_are_drawn(finished: Stoker) -> None:
    pytest.importorskip("matplotlib")
    metrics_file(finished.latest, [1.7e308, -1.7e308] * 40)
    for words in ((), ("--log",), ("--smooth", "3"), ("--png", "large.png")):
        done = finished("plot", "exp", *words)
        assert done.code == 0 and "Traceback" not in done.err, (words, done.err)


@pytest.mark.parametrize("values", [[1e308, -1e308], [1e308, 1e308], [-1.7e308, 1e308, 2.0]])
def test_the_largest_numbers_have_a_mean(values: list[float]) -> None:
    curve = Curve()
    curve.extend(list(range(200)), [values[at % len(values)] for at in range(200)])
    for window in (1, 10):
        draw_chart([Series("a", curves.smooth_points(curve, window))], 60, 10)
    measure_difference(curve, curve)
    sparkline(curve.values)
    assert mean([1e308, 1e308]) == pytest.approx(1e308)
