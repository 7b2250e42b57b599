"""What the thirty-first review found: words of hosts and of files in commands that are advised, names of other users' programs in
the kernel's log, other users' events in viewers' memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import tracemalloc
from pathlib import Path

import pytest

from stoker.contract.shapes import Around, Evidence, RankEnd
from stoker.control.doctor.checks import net
from stoker.control.machine import gather, kernellog
from stoker.control.machine.facts import Net
from stoker.control.record.history import Members, Moment
from stoker.control.record.reader import Run
from stoker.control.show import curves, folder
from stoker.control.show.gather import Gatherer
from stoker.control.verdict.judge import judge

# A kernel's own lines of programs that uid 12345 had called so, started by their names and through a link `a`.
CRASH = "{}[6542]: segfault at 0 ip 000000000040161e sp 00007ffea3d870e0 error 6 in {}[161e,401000+78000] likely on CPU 0 (core 0, socket 0)"
SICK = "NVRM: Xid (PCI:0000:3b:00): 79, x"
SPENT = "Out of memory: Killed process 4242 (python)"
REAL_XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
REAL_KILL = "Out of memory: Killed process 4242 (python) total-vm:98304kB, anon-rss:61440kB, UID:0"


def verdict_with(kernel: str, code: int) -> str:
    end = RankEnd(0, "", "GPU 0", 4242, code, 1.0, tail="CUDA error: x\n", around=Around(kernel=(kernel,)))
    return judge(Evidence(world_size=1, ends=(end,))).cause


@pytest.mark.parametrize("started_as", ["a", SICK[:15], SPENT[:15]])
def test_the_name_of_a_crashed_program_accuses_no_gpu(started_as: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forged = [CRASH.format(started_as, name) for name in (SICK, f"a): 79 process 4242 {SICK}", f"{SPENT} {SICK}")]
    monkeypatch.setattr(kernellog, "lines", lambda since=0.0: iter(forged))
    assert gather._kernel_xids() == {}
    assert {verdict_with(line, -6) for line in forged} == {verdict_with("", -6)}
    monkeypatch.setattr(kernellog, "lines", lambda since=0.0: iter([REAL_XID]))
    assert gather._kernel_xids() == {"0000:3b:00": [79]}
    assert verdict_with(REAL_XID, -6) == "gpu.lost"


@pytest.mark.parametrize("started_as", ["a", SPENT[:15]])
def test_the_name_of_a_crashed_program_kills_nobody(started_as: str) -> None:
    assert verdict_with(CRASH.format(started_as, SPENT), -9) == verdict_with("", -9) != "oom.host"
    assert verdict_with(REAL_KILL, -9) == "oom.host"


# ---- words of a host, or of a recorded machine, in a command to copy ----

TRAPS = [
    "203.0.113.9; touch trapped",
    "$(touch trapped)",
    "10.0.0.2%eth0;touch${IFS}trapped",
    "x' ; touch trapped ; echo '",
]


def typed(line: str, folder: Path) -> list[str]:
    """The words that a shell makes of a line whose first one is a program; what else it runs can leave a file."""
    program = line.split()[0]
    argv = ["bash", "-c", f"{program}() {{ printf '%s\\n' \"$@\"; }}; {line}"]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=True)
    assert not [*folder.iterdir()], line
    return done.stdout.splitlines()


@pytest.mark.parametrize("trap", TRAPS)
def test_a_recorded_machines_name_is_one_word_of_a_command(trap: str, tmp_path: Path) -> None:
    (found,) = net.hostname(Net(trap, (), ("eth0",), None, None, "no such name"))
    assert typed(found.fix.partition(" >> ")[0], tmp_path) == [f"127.0.1.1 {trap}"]


# ---- what a viewer keeps of another user's events ----


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be two users")
def test_a_viewer_keeps_nothing_of_any_size_of_another_users_events(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    run = root / "20261117-000000-x"
    run.mkdir(parents=True)
    launcher = {"pid": 1, "start": 1, "host": "elsewhere"}
    record = {"schema": 1, "name": "x", "started": 1.7e9, "launcher": launcher, "plan": {"world_size": 2}}
    (run / "run.json").write_text(json.dumps(record))
    nothing = json.dumps([[]] * 60_000)
    path, looks = run / "events.jsonl", 3
    path.write_text('{"event": "run", "time": 1700000000}\n')
    for one in (run, *run.iterdir()):
        os.chown(one, 12345, -1)
    gatherer = Gatherer(str(root), everybody=True, machine=False)
    tracemalloc.start()
    try:
        for look in range(looks):
            with path.open("a") as events:
                for place in (2 * look, 2 * look + 1):
                    events.write(
                        f'{{"event": "straggler", "time": 1700000001, "rank": {place}, "summary": "s", "x": {nothing}}}\n'
                    )
                    events.write(
                        f'{{"event": "role-served", "time": 1700000001, "role": "{place}", "replicas": {nothing}}}\n'
                    )
            (shown,) = gatherer.snapshot().runs
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert not shown.mine and shown.suspicion is not None
    assert kept < 4 << 20, "of 3 looks at 720 KB, which are 15 MB as lists each"


def test_a_curve_of_another_user_begins_anew_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curves, "_MOST_TAKEN", 8192)
    path, tail, most = tmp_path / "metrics.jsonl", curves.MetricsTail(str(tmp_path), 4096), 0
    for look in range(40):
        with path.open("a") as file:
            file.writelines(f'{{"step": {100 * look + place}, "time": 1.0, "loss": 2.5}}\n' for place in range(50))
        assert tail.look() and tail.step == 100 * look + 49 and tail.newest["loss"] == 2.5
        most = max(most, len(tail.curves["loss"].steps), len(tail.clock.steps))
    assert 50 < most < 400, "of 2,000 points"
    whole = curves.MetricsTail(str(tmp_path))
    assert whole.look() and len(whole.curves["loss"].steps) == 2000


def test_losses_that_another_users_ranks_told_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "_LOSSES_OF_OTHERS", 10)
    members = Members((0,), (), ())
    for mine, kept in ((True, 95), (False, 5)):
        record = Run("/nowhere", "x", {}, None, 12345, mine)
        seen = folder.RunFolder(record)
        for step in range(95):
            seen.pass_by(Moment(1.0 + step, 0, members, {"step": (step,), "loss": (2.5,)}, {}, {}))
        assert len(seen.curve("loss").steps) == kept
