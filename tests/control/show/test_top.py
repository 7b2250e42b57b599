"""`stoker top`: frames of any size, keys by Textual's pilot, the real screen in tmux, and hosts that are cut off."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import Stoker, at_length_but, gpu_json, machine_json, wait_for
from netcluster import NetCluster
from stoker.contract.evidence import Verdict
from stoker.contract.frozen import replace
from stoker.control.cluster.host_monitor import HostMonitor
from stoker.control.cluster.hosts import read_hosts_file as read_hosts
from stoker.control.machine.model import Holder
from stoker.control.show.charts import display_width
from stoker.control.show.snapshot import (
    GpuGauges,
    HostGauges,
    RankView,
    RunView,
    Snapshot,
    Suspicion,
    snapshot_from_json,
)
from stoker.control.show.top.frame import Frame, draw_text, make_frame
from stoker.control.show.top.sources import demo_snapshot
from stoker.control.show.top.table import PANELS, RANKS, RUNS, plain_text
from stoker.control.show.top.view import View, drop_deleted_run, handle_key


def until(look: Callable[[], Any], seconds: float) -> bool:
    return bool(wait_for(lambda: look() or None, seconds))


# What anybody may call a run, a command or a host; and characters two columns wide, or none.
HOSTILE = "[bold red]x[/] \x1b[31m\x07\r\nname 漢字 e\u0301 \u202egnp"


def demo(hosts: int = 2, gpus: int = 4) -> Snapshot:
    return demo_snapshot(1_000_000.0, 999_900.0, hosts, gpus)


def own_demo() -> Snapshot:
    """The runs are one's own."""
    made = demo()
    return replace(made, runs=tuple(replace(run, mine=True, dir=f"runs/{run.id}") for run in made.runs))


def nothing_known() -> Snapshot:
    """Each field that may be None is, and names are hostile."""
    card = GpuGauges(0, "GPU-0", HOSTILE, host=HOSTILE, processes=(Holder(1, None, HOSTILE, HOSTILE, HOSTILE),))
    run = RunView(HOSTILE, HOSTILE, "runs/x", HOSTILE, True, HOSTILE, 1e300, problem=HOSTILE, command=HOSTILE)
    offline = HostGauges("gone", state="OFFLINE", reason=HOSTILE)
    return Snapshot(1e300, (HostGauges(HOSTILE), offline), (card,), (run,), HOSTILE, problems=(HOSTILE,))


def wild_numbers() -> Snapshot:
    """Values as a damaged record may have them."""
    curve = ((0, 1e308), (1, "nan"), (2, -1e308), (3, "inf"), (2**62, 0.0), (2**62 + 1, None))
    rank = RankView(
        0, HOSTILE, 0, HOSTILE, "h", "GPU-0", step=2**62, step_s=1e308, waiting=-1e308, beat_age=1e308, memory=2**62
    )
    rank = replace(rank, state="failed", exit_code=-9, recent={"step_s": (1e308, None, -1e308)})
    run = RunView(
        "r", "", "runs/r", "u", True, "running", -1e10, step=2**62, total_steps=1, loss="nan", tokens_per_s=1e308, mfu="inf", eta_s=1e308,
        seconds=1e308, ranks=(rank,), curve=curve, restarts={HOSTILE: 2**60}, grad_norm="-inf", lr=1e-300,
        suspicion=Suspicion(0.0, "suspicion", "hang", HOSTILE * 20), verdict=Verdict("failed", "c", HOSTILE * 20, 1),
    )  # fmt: skip
    card = GpuGauges(
        2**31, "GPU-0", host="h", utilization=1e308, memory_used=2**62, memory_total=1, temperature=-(2**31), power=-1e308, throttle=(HOSTILE,) * 9,
        error=HOSTILE, recent={"utilization": (1e308, -1e308, None)},
    )  # fmt: skip
    host = HostGauges(
        "h",
        load=(1e18, 0.0, 0.0),
        cpu=1e308,
        memory_total=0,
        memory_available=2**62,
        disk_free=0,
        disk_total=0,
        received=1e308,
        sent=-1.0,
    )
    return Snapshot(-1e300, (host,), (card,), (run,))


SNAPSHOTS = {
    "demo": demo(),
    "many": demo(16, 8),
    "none": Snapshot(0.0),
    "unknown": nothing_known(),
    "wild": wild_numbers(),
}
SIZES = [(1, 1), (5, 2), (20, 8), (20, 50), (80, 24), (139, 50), (160, 50), (300, 12), (400, 120)]


@pytest.mark.parametrize("name", SNAPSHOTS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_frame_fills_its_screen_exactly(name: str, size: tuple[int, int]) -> None:
    width, height = size
    for view in (
        View(),
        View(focus=RUNS),
        View(mode="help"),
        View(mode="sort", focus=RANKS),
        View(filter="gpu", paused=True),
    ):
        frame = make_frame(SNAPSHOTS[name], view, width, height)
        assert len(frame.lines) == height
        for line in frame.lines:
            shown = "".join(piece for piece, _ in line)
            assert display_width(shown) == width and all(sign.isprintable() for sign in shown), shown


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_the_text_is_whole_and_printable(name: str) -> None:
    snapshot = SNAPSHOTS[name]
    shown = draw_text(snapshot, 80)
    assert all(
        display_width(line) <= 80 and line.isprintable()
        for line in shown.split("\n")[: -len(snapshot.problems) or None]
    )
    assert shown.count("GPU") >= len(snapshot.gpus)


def test_no_number_and_no_heading_is_cut_at_80_columns(stoker: Stoker) -> None:
    lines = stoker("top", "--demo", "--once", env={"COLUMNS": "80"}).out.splitlines()
    titles, host = lines[2], next(line for line in lines if line.startswith("node1"))
    state = next(line for line in lines if line.startswith("running "))
    step = next(line for line in lines if line.startswith("step "))
    assert "HISTORY" in titles and host.endswith("/s") and step.split("  ")[-1].split()[0] in ("MFU", "lr", "grad")
    assert [line for line in (titles, host, step, state) if "…" in line] == []


def test_runs_of_one_name_have_their_ids() -> None:
    made = demo()
    runs = tuple(replace(made.runs[0], id=f"2026111{n}-220320-sft", name="sft" if n < 2 else "dpo") for n in range(3))
    shown = draw_text(replace(made, runs=runs), 80, View())
    listed = [line.split()[0] for line in shown.splitlines() if re.match(r"\d{8}-|sft |dpo ", line)]
    assert listed == ["dpo", "20261111-220320-sft", "20261110-220320-sft"], shown


def test_a_run_that_is_over_has_no_ranks_any_more() -> None:
    made = demo()
    run = replace(made.runs[-1], state="completed", ranks=(), verdict=Verdict("completed", "completed", "", 0))
    assert "the run has ended and has no ranks" in draw_text(replace(made, runs=(run,)), 80, View())
    assert "no ranks are known" in draw_text(replace(made, runs=(replace(run, state="running"),)), 80, View())


def test_a_snapshot_comes_back_from_its_json() -> None:
    for snapshot in (demo(), demo(16, 8), Snapshot(0.0)):
        assert snapshot_from_json(json.loads(json.dumps(snapshot.to_json()))).to_json() == snapshot.to_json()


def test_what_is_wrong_is_seen_at_80_columns() -> None:
    shown = screen(make_frame(demo(), View(), 80, 24))
    for words in (
        "thermal slowdown",
        "is slow because its GPU's clock is held down",
        "wait 0.9 s of each 2.5 s step",
        "ETA",
        "tokens/s",
        "1 restart",
    ):
        assert words in shown, shown


def screen(frame: Frame) -> str:
    return "\n".join(plain_text(line) for line in frame.lines)


# ---- keys and mouse, by Textual's pilot ----


class Still:
    """A source whose snapshot is set by the test."""

    interval = 0.25
    status = ""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.watched: tuple[str, ...] = ()

    def take_snapshot(self, watched: tuple[str, ...]) -> Snapshot:
        self.watched = watched
        return self.snapshot

    def seek(self, what: str) -> str:
        return f"seek {what}"


def drive(source: Still, play: Callable[[Any, Any], Awaitable[None]], size: tuple[int, int] = (80, 24)) -> list[str]:
    """`play(app, pilot)` after the first snapshot is drawn. Returns the folders of runs that were to be stopped."""
    pytest.importorskip("textual")
    from stoker.control.show.top.app import TopApp

    stopped: list[str] = []

    async def main() -> None:
        app = TopApp(source, View(), lambda folder: stopped.append(folder) or "stopping")
        async with app.run_test(size=size) as pilot:
            while app.snapshot.time == 0.0:
                await pilot.pause(0.01)
            await play(app, pilot)

    asyncio.run(main())
    return stopped


def test_keys_sort_filter_and_help() -> None:
    async def play(app: Any, pilot: Any) -> None:
        await pilot.press("o", "t")
        rows = [line for line in screen(app.frame).split("\n") if "GPU" in line and "°C" in line]
        assert rows[0].split()[0] == "node2/GPU2"
        await pilot.press("o", "t")
        rows = [line for line in screen(app.frame).split("\n") if "GPU" in line and "°C" in line]
        assert "node2/GPU2" not in rows[0]
        await pilot.press("o", "ä")
        assert "unknown sort letter" in screen(app.frame)
        await pilot.press("o", "n", "slash", *"node2")
        assert "node1" not in screen(app.frame).split("RUN demo")[0] and "filter: node2" in screen(app.frame)
        await pilot.press("enter", "tab", "tab", "down")
        assert app.view.focus == RANKS and app.view.cursors[RANKS] == "4"
        await pilot.press("escape", "end")
        assert app.view.cursors[RANKS] == "7" and app.view.filter == ""
        await pilot.press("h")
        assert "Sorting, after o" in screen(app.frame)
        await pilot.press("x", "5", "down", "down")
        assert app.view.run == "demo-first" and "RUN first try" in screen(app.frame)
        await pilot.press("space")
        assert "PAUSED" in screen(app.frame)
        await pilot.press("q")

    assert drive(Still(demo()), play) == []


def test_a_run_is_stopped_only_after_a_question_and_only_ones_own() -> None:
    source = Still(own_demo())

    async def play(app: Any, pilot: Any) -> None:
        await pilot.press("T")
        assert "stop run demo-20260101-120000?" in screen(app.frame)
        await pilot.press("n")
        assert "not stopped" in screen(app.frame)
        await pilot.press("T", "enter", "T", "y")
        assert "stopping" in screen(app.frame)
        source.snapshot = replace(demo(), time=5.0)
        while app.snapshot.time != 5.0:
            await pilot.pause(0.01)
        await pilot.press("T", "y")
        assert app.view.mode == "browse"

    assert drive(source, play) == ["runs/demo-20260101-120000"]


def test_mouse_and_sizes() -> None:
    async def play(app: Any, pilot: Any) -> None:
        for name in PANELS:
            place = app.frame.areas[name]
            await pilot.click(offset=(place.x + 3, place.y))
            assert app.view.focus == name
        ranks = app.frame.areas[RANKS]
        await pilot.click(offset=(ranks.x + 3, ranks.y + 2))
        assert app.view.cursors[RANKS] == "1"
        for size in ((160, 50), (20, 8), (1, 1), (80, 24)):
            await pilot.resize_terminal(*size)
            await pilot.pause()
            assert (len(app.board.lines), display_width(plain_text(app.board.lines[0])) <= size[0]) == (size[1], True)
        await pilot.press("q")

    drive(Still(own_demo()), play)


def test_markup_of_others_is_text_and_a_vanished_run_is_no_end() -> None:
    source = Still(replace(nothing_known(), time=1.0))

    async def play(app: Any, pilot: Any) -> None:
        await pilot.pause()
        strips = "\n".join(strip.text for strip in (app.board.render_line(y) for y in range(24)))
        assert "[bold red]x[/] \\x1b[31m" in strips and "\x1b" not in strips
        source.snapshot = Snapshot(2.0)
        while app.snapshot.time != 2.0:
            await pilot.pause(0.01)
        assert "no run" in screen(app.frame)

    drive(source, play)


def test_a_deleted_run_that_was_chosen_is_not_replaced_in_silence() -> None:
    seen = replace(own_demo(), root="/runs")
    view = View(run=seen.runs[0].id)
    assert drop_deleted_run(view, seen) is view
    left = drop_deleted_run(view, replace(seen, runs=seen.runs[1:]))
    assert left.run == "" and f"run {seen.runs[0].id} no longer exists" in left.note
    assert left.note in screen(make_frame(replace(seen, runs=seen.runs[1:]), left, 160, 40))


def test_a_source_that_fails_or_hangs_is_shown_and_keys_still_work() -> None:
    class Broken(Still):
        def take_snapshot(self, watched: tuple[str, ...]) -> Snapshot:
            if self.snapshot.time == 1.0:
                return self.snapshot
            raise ValueError("a folder \x1b of chaos")

    source = Broken(Snapshot(1.0))

    async def play(app: Any, pilot: Any) -> None:
        source.snapshot = Snapshot(2.0)
        while not app.snapshot.problems:
            await pilot.pause(0.01)
        assert "ValueError: a folder \\x1b of chaos" in screen(app.frame)
        await pilot.press("h")
        assert "Keys" in screen(app.frame)

    drive(source, play)


def test_a_recording_is_held_and_sought() -> None:
    seen = []
    for key, sign in (("space", " "), ("left", ""), ("right", ""), ("plus", "+"), ("minus", "-"), ("T", "T")):
        view, effect = handle_key(View(replay=True), key, sign, own_demo(), 5)
        seen.append(effect.name if effect is not None else view.note)
        assert not view.paused
    assert seen == ["pause", "back", "forth", "faster", "slower", "a recording can't be stopped"]


# ---- the command ----


def test_once_json_and_demo(stoker: Stoker, box: Callable[..., dict[str, str]]) -> None:
    holder = {"pid": 4711, "memory": 10**9, "command": HOSTILE, "user": "eve", "run": None, "age": 5.0}
    env = box([gpu_json(0, utilization=93, memory_used=30 * 10**9, holders=[holder]), gpu_json(1)])
    done = stoker("top", "--once", env={**env, "COLUMNS": "160"})
    assert done.code == 0 and "93%" in done.out and "27.9/45 GiB" in done.out and "4711" in done.out, (
        done.out + done.err
    )
    assert "[bold red]x[/] \\x1b[31m" in done.out and "\x1b" not in done.out
    found = snapshot_from_json(json.loads(stoker("top", "--json", env=env).out))
    assert [card.utilization for card in found.gpus] == [0.93, 0.0] and found.hosts[0].cpu is not None
    shown = stoker("top", "--demo", "--once", env={"COLUMNS": "80"})
    assert shown.code == 0 and "is slow because" in shown.out and max(map(len, shown.out.split("\n"))) <= 80


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["top"], 69, "stoker top needs a terminal; `stoker top --once`"),
        (["top", "--once", "--interval", "0.1"], 64, "at least 0.25s"),
        (["top", "--once", "--hosts", "nowhere.yaml"], 66, "nowhere.yaml"),
        (["top", "--once", "--replay", "nobody"], 66, "no run"),
        (["top", "--demo", "--replay", "x"], 64, "can't be combined"),
    ],
)
def test_refusals_are_one_line(stoker: Stoker, args: list[str], code: int, says: str) -> None:
    done = stoker(*args)
    assert (done.code, done.out) == (code, "") and says in done.err and done.err.count("\n") == 1, done.err


def test_damaged_folders_are_shown_as_they_are(stoker: Stoker) -> None:
    runs = stoker.cwd / "runs"
    for name, content in {"half": '{"schema": 1, "na', "odd": "[1, 2]", "empty": ""}.items():
        (runs / name).mkdir(parents=True)
        (runs / name / "run.json").write_text(content)
    (runs / "whole").mkdir()
    (runs / "whole" / "run.json").write_text(
        json.dumps({"schema": 1, "name": "whole", "started": 1.0, "plan": {"ranks": [{}, 5, {"rank": 0}]}})
    )
    (runs / "whole" / "metrics.jsonl").write_text('{"schema": 1, "step": 3, "loss": "nan"}\n{"st')
    (runs / "whole" / "history").mkdir()
    (runs / "whole" / "history" / "seconds.jsonl").write_bytes(b'\xff\x00\n{"schema": 1, "members": 5}\n')
    done = stoker("top", "--once")
    assert done.code == 0 and "damaged" in done.out and "nan" in done.out and "Traceback" not in done.err, done.err
    again = stoker("top", "--replay", "whole", "--once")
    assert again.code == 66 and "has no history" in again.err and again.err.count("\n") == 1


def test_without_textual_one_line_says_what_to_install(stoker: Stoker) -> None:
    program = (
        "import sys; sys.modules['textual'] = sys.modules['rich'] = None; from stoker.cli.main import entry; entry()"
    )
    master, slave = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", program, "top", "--demo"],
        cwd=stoker.cwd, env=stoker.environment(), stdin=slave, stdout=slave, stderr=slave,
    ) as child:  # fmt: skip
        os.close(slave)
        assert child.wait(60) == 69
    said = os.read(master, 10_000).decode()
    os.close(master)
    assert "pip install textual" in said and said.count("\n") == 1
    done = subprocess.run(
        [sys.executable, "-c", program, "top", "--demo", "--once"],
        cwd=stoker.cwd,
        env=stoker.environment(),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0 and b"UTIL" in done.stdout


# ---- the real screen, of a real run ----


class Tmux:
    def __init__(self, folder: Path) -> None:
        self._socket = str(folder / "tmux")

    def __call__(self, *words: str) -> str:
        return subprocess.run(["tmux", "-S", self._socket, *words], capture_output=True, text=True, check=False).stdout

    def screen(self, *more: str) -> str:
        return self("capture-pane", "-p", "-t", "t", *more)


@pytest.fixture
def tmux(tmp_path: Path) -> Iterator[Tmux]:
    pytest.importorskip("textual")
    if shutil.which("tmux") is None:
        pytest.skip("there is no tmux")
    made = Tmux(tmp_path)
    try:
        yield made
    finally:
        made("kill-server")


BEATING = """
import os, time, stoker
for step in range(100_000):
    time.sleep(0.1)
    print(f"step {step} loss {9 - step / 100:.4f}" if step != 3 else "step 3 loss nan", flush=True)
    stoker.beat(step)
"""


def test_a_real_run_is_watched_stopped_replayed_and_deleted(stoker: Stoker, tmux: Tmux) -> None:
    script = stoker.script("beating.py", BEATING)
    run = stoker.start("run", "--nproc-per-node", "2", "--name", "watched", script, stdout=subprocess.DEVNULL)
    try:
        _watched(stoker, tmux, run)
    finally:
        run.terminate()
        run.wait(60)


def _watched(stoker: Stoker, tmux: Tmux, run: subprocess.Popen[bytes]) -> None:
    words = [
        "env",
        "NO_COLOR=1",
        f"STOKER_MACHINE={stoker.environment()['STOKER_MACHINE']}",
        sys.executable,
        "-m",
        "stoker",
        "top",
        "--interval",
        "0.5",
    ]
    tmux("new-session", "-d", "-x", "80", "-y", "24", "-s", "t", "-c", str(stoker.cwd), *words)
    assert until(lambda: "RUN watched" in tmux.screen() and "loss" in tmux.screen() and "CPU1" in tmux.screen(), 60), (
        tmux.screen()
    )
    coloured = re.findall(r"\x1b\[[\d;]*\b[349][0-7]m", tmux.screen("-e"))
    assert not coloured, "NO_COLOR has colours"
    tmux("resize-window", "-t", "t", "-x", "20", "-y", "8")
    assert until(lambda: tmux.screen().rstrip().endswith("q quit  h help  o s…"), 20), tmux.screen()
    tmux("resize-window", "-t", "t", "-x", "160", "-y", "50")
    assert until(lambda: "STEP TIME" in tmux.screen(), 20)
    assert until((stoker.latest / "history" / "seconds.jsonl").exists, 60)
    tmux("send-keys", "-t", "t", "T")
    assert until(lambda: "stop run" in tmux.screen(), 20), tmux.screen()
    tmux("send-keys", "-t", "t", "y")
    assert run.wait(60) == 128 + signal.SIGTERM
    assert until(lambda: "stopped" in tmux.screen() and "0 of 1 run running" in tmux.screen(), 20), tmux.screen()
    played = stoker("top", "--replay", "watched", "--once")
    assert played.code == 0 and "RUN watched" in played.out and "stopped" in played.out, played.err
    shutil.rmtree(stoker.latest)
    assert until(lambda: "no run yet" in tmux.screen(), 20), tmux.screen()
    tmux("send-keys", "-t", "t", "q")
    assert until(lambda: not tmux("list-sessions"), 20)


# ---- other hosts ----


@pytest.mark.parametrize("cut_for", at_length_but(["link"], ["link", "sshd"]))
def test_a_host_that_is_cut_off_is_offline_and_holds_up_nobody(
    stoker: Stoker, netcluster: NetCluster, tmp_path: Path, cut_for: str
) -> None:
    for number in range(3):
        machine = tmp_path / f"machine{number}.json"
        machine.write_text(json.dumps(machine_json([gpu_json(0, utilization=10 * number)])))
        netcluster.set_env(number, STOKER_MACHINE=str(machine))
    names = [host.name for host in netcluster.hosts]
    told = json.loads(stoker("top", "--json", "--hosts", str(netcluster.file())).out)
    assert [(host["name"], host["state"]) for host in told["hosts"]] == [(name, "OK") for name in names]
    assert [card["host"] for card in told["gpus"]] == names
    elsewhere = HostMonitor(read_hosts(str(netcluster.file())), 0.5)

    def states() -> dict[str, str]:
        begun = time.process_time(), time.monotonic()
        found = {host.name: host.state for host, _ in elsewhere.readings()}
        assert time.process_time() - begun[0] < 0.5, "reading waits for a host"
        return found

    try:
        assert until(lambda: states() == dict.fromkeys(names, "OK"), 60), elsewhere.readings()
        cards = {card.host: card.utilization for _, gpus in elsewhere.readings() for card in gpus}
        assert cards == dict(zip(names, (0.0, 0.1, 0.2), strict=True))
        if cut_for == "link":
            netcluster.cut(1)
        else:
            netcluster.stop_sshd(1)
            for pid in netcluster.pids(1):
                os.kill(pid, signal.SIGKILL)
        assert until(lambda: states()[names[1]] == "OFFLINE", 60)
        host, gpus = elsewhere.readings()[1]
        assert host.reason and gpus == (), host
        before = [reading[0].time for reading in elsewhere.readings()]
        assert until(lambda: all(elsewhere.readings()[at][0].time > before[at] for at in (0, 2)), 20)
        netcluster.heal(1) if cut_for == "link" else netcluster.start_sshd(1)
        assert until(lambda: states() == dict.fromkeys(names, "OK"), 60), elsewhere.readings()
    finally:
        elsewhere.close()
    assert until(lambda: not any(netcluster.pids(number) for number in (0, 2)), 30), "a far end is left"
