"""What tests/workers.py promises: every test once, what it printed with it, and no worker's death unseen."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent

FIRST = """
import os, signal, time, warnings, pytest

@pytest.fixture(scope="module")
def held(tmp_path_factory):
    yield tmp_path_factory.mktemp("held")
    with open(os.environ["SEEN"], "a") as seen:
        seen.write("closed\\n")

@pytest.mark.parametrize("number", range(20))
def test_many(held, number):
    os.write(1, b"of %d" % number)  # what pytest captures by its descriptor
    with open(os.environ["SEEN"], "a") as seen:
        seen.write(f"{os.getpid()} first {number}\\n")
    assert number != 7

def test_dies(held):
    os.kill(os.getpid(), signal.SIGKILL)

@pytest.mark.timeout(1)
def test_hangs(held):
    time.sleep(60)

def test_behind_it(held):
    warnings.warn("look at this")
"""
SECOND = """
import os

def test_elsewhere(tmp_path):
    with open(os.environ["SEEN"], "a") as seen:
        seen.write(f"{os.getpid()} second {tmp_path}\\n")
"""


def test_each_runs_once_and_a_dead_worker_fails_only_what_it_ran(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(f"import sys\nsys.path.insert(0, {str(TESTS)!r})\nfrom workers import *\n")
    (tmp_path / "test_a.py").write_text(FIRST)
    (tmp_path / "test_b.py").write_text(SECOND)
    words = ["-q", "--workers", "2", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        capture_output=True,
        text=True,
        check=False,
        env={"SEEN": str(tmp_path / "seen"), "TMPDIR": str(tmp_path)},
    )
    out, seen = done.stdout, (tmp_path / "seen").read_text().splitlines()
    assert done.returncode == 1 and re.search(r"^3 failed, 21 passed, 1 warning in ", out, re.M), out + done.stderr
    assert "Failed: Timeout" in out, out
    assert "the process that ran it was killed by signal 9" in out and "UserWarning: look at this" in out
    assert re.findall(r"^of (\d+)$", out, re.M) == ["7"], "what a test printed is shown with it alone"
    assert sorted(line.split()[2] for line in seen if "first" in line) == sorted(map(str, range(20)))
    assert seen.count("closed") == 1, "by the worker that came after the dead one"
    pids = [{line.split()[0] for line in seen if word in line} for word in ("first", "second")]
    assert len(pids[0]) == 1 and not pids[0] & pids[1], "a process for each file"
    assert "/worker-" in next(line for line in seen if "second" in line)
