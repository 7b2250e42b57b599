"""What another user's record may cost us: a line, not the viewer. Work is bounded by the kernel (CPU time and
memory of a child), not by a clock.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
CPU_S, MEMORY = 20, 2 << 30


def bounded(code: str, *words: str) -> str:
    """What that program prints; it ends by a signal, or a MemoryError, where it needs more than that."""

    def limits() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

    argv = [sys.executable, "-c", code, *words]
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run(argv, capture_output=True, text=True, env=env, preexec_fn=limits, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr[-1000:])
    return done.stdout


# ---- another user's record, looked at again and again ----

TAIL = """
import os, sys
from stoker.control.show.folder import EventTail
from stoker.control.show.curves import MOST_OF_OTHERS, MetricsTail
folder, name = sys.argv[1:]
tail = EventTail(folder, False) if name == "events.jsonl" else MetricsTail(folder, MOST_OF_OTHERS)
path = os.path.join(folder, name)
with open(path, "w") as file: file.write('{"event": "run", "step": 0, "time": 1}\\n')
tail.look()
with open(path, "r+b") as file:
    for at in range(1 << 19, (8 if name == "metrics.jsonl" else 24) << 30, (1 << 19) if name == "metrics.jsonl" else (15 << 20)):
        file.seek(at)
        file.write(b"\\n")
    file.seek(0, 2)
    file.write(b'{"event": "attempt", "attempt": 3, "step": 7, "time": 2}\\n')
tail.look()
print(tail.attempt if name == "events.jsonl" else tail.step)
"""


@pytest.mark.parametrize(("name", "newest"), [("events.jsonl", 3), ("metrics.jsonl", 7)])
def test_a_record_that_grows_by_nothing_is_not_read_through(tmp_path: Path, name: str, newest: int) -> None:
    if shutil.disk_usage(tmp_path).free < 1 << 30:
        pytest.skip("no room for a file of holes")
    assert int(bounded(TAIL, str(tmp_path), name)) == newest


def test_lines_with_names_of_their_own_cost_little(tmp_path: Path) -> None:
    lines = (
        json.dumps({"schema": 1, "step": step, "loss": 1.5, **{f"{step * 200 + at:x}": 1 for at in range(200)}})
        for step in range(1000)
    )
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    code = (
        "import sys\nfrom stoker.control.show.curves import MOST_OF_OTHERS, MetricsTail\ntail = MetricsTail(sys.argv[1], MOST_OF_OTHERS)\n"
        "tail.look()\nprint(tail.step, len(tail.curves), 'loss' in tail.curves)"
    )
    assert bounded(code, str(tmp_path)) == "999 200 True\n"


def test_events_of_another_user_fill_no_memory(tmp_path: Path) -> None:
    from stoker.control.show.folder import EventTail

    tail = EventTail(str(tmp_path), False)
    for number in range(5_000):
        tail.take({"event": "run", "time": number})
        tail.take({"event": "phase", "time": number, "rank": number * 1000, "name": "x"})
        tail.take({"event": "rank-exit", "time": number, "rank": -number, "code": 0})
        tail.take({"event": "restart", "time": number, "cause": f"c{number}"})
    assert (
        tail.start == (4_999, 4_999) and len(tail.phases) <= 100 and len(tail.ended) < 2 and len(tail.restarts) <= 1000
    )
