"""What tests/workers.py promises: every test once, what it printed with it, and no worker's death unseen."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

from conftest import wait_for

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


def start(folder: Path, workers: int, files: dict[str, str], *words: str) -> subprocess.Popen[str]:
    """pytest in that folder."""
    beside = f"import sys\nsys.path.insert(0, {str(TESTS)!r})\nfrom workers import *\n"
    for name, text in {"conftest.py": beside, **files}.items():
        (folder / name).write_text(text)
    words = ("-q", "--workers", str(workers), "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder), *words)
    env = {"SEEN": str(folder / "seen"), "TMPDIR": str(folder)}
    argv = [sys.executable, "-m", "pytest", *words]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def run(
    folder: Path, workers: int, files: dict[str, str], *words: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """How it ended, and the lines that its tests wrote."""
    started = start(folder, workers, files, *words)
    out, err = started.communicate()
    done = subprocess.CompletedProcess(started.args, started.returncode, out, err)
    return done, (folder / "seen").read_text().splitlines()


def test_each_runs_once_and_a_dead_worker_fails_only_what_it_ran(tmp_path: Path) -> None:
    done, seen = run(tmp_path, 2, {"test_a.py": FIRST, "test_b.py": SECOND})
    out = done.stdout
    assert done.returncode == 1 and re.search(r"^3 failed, 21 passed, 1 warning in ", out, re.M), out + done.stderr
    assert "Failed: Timeout" in out, out
    assert "the process that ran it was killed by signal 9" in out and "UserWarning: look at this" in out
    assert re.findall(r"^of (\d+)$", out, re.M) == ["7"], "what a test printed is shown with it alone"
    assert sorted(line.split()[2] for line in seen if "first" in line) == sorted(map(str, range(20)))
    assert seen.count("closed") == 1, "by the worker that came after the dead one"
    pids = [{line.split()[0] for line in seen if word in line} for word in ("first", "second")]
    assert len(pids[0]) == 1 and not pids[0] & pids[1], "a process for each file"
    assert "/worker-" in next(line for line in seen if "second" in line)


LONG = """
import os, time, pytest

@pytest.fixture(scope="module", autouse=True)
def held():
    yield
    with open(os.environ["SEEN"], "a") as seen:
        seen.write(f"{os.getpid()} closed -\\n")

@pytest.mark.parametrize("number", range(24))
def test_takes_a_while(number):
    with open(os.environ["SEEN"], "a") as seen:
        seen.write(f"{os.getpid()} ran {number}\\n")
    time.sleep(0.5)
    assert number != 23
"""


def test_the_last_file_is_shared_by_those_that_have_nothing_left_to_do(tmp_path: Path) -> None:
    done, seen = run(tmp_path, 3, {"test_a.py": LONG, "test_b.py": "def test_short(): pass\n"})
    assert done.returncode == 1 and re.search(r"^1 failed, 24 passed in ", done.stdout, re.M), done.stdout + done.stderr
    ran = [line.split() for line in seen]
    assert sorted(int(number) for _, what, number in ran if what == "ran") == list(range(24)), "each once"
    pids = {pid for pid, what, _ in ran if what == "ran"}
    assert len(pids) == 3 and sorted(pid for pid, what, _ in ran if what == "closed") == sorted(pids)


def test_after_a_failure_that_ends_the_run_nobody_begins_another_test(tmp_path: Path) -> None:
    fails = LONG.replace("number != 23", "number != 0")
    done, seen = run(tmp_path, 2, {"test_a.py": fails, "test_b.py": LONG}, "-x")
    assert done.returncode == 1 and "stopping after 1 failures" in done.stdout, done.stdout + done.stderr
    assert sum(" ran " in line for line in seen) < 8


def test_interrupted_all_workers_end_at_once_and_put_their_fixtures_away(tmp_path: Path) -> None:
    text = LONG.replace("sleep(0.5)", "sleep(200)")
    started, seen = start(tmp_path, 2, {"test_a.py": text, "test_b.py": text}), tmp_path / "seen"
    assert wait_for(lambda: (seen.exists() and seen.read_text().count(" ran ") == 2) or None, 60)
    started.send_signal(signal.SIGINT)
    out, err = started.communicate(timeout=100)
    assert started.returncode == 2 and "KeyboardInterrupt" in out and not err, out + err
    pids = {int(line.split()[0]) for line in seen.read_text().splitlines()}
    assert wait_for(lambda: (seen.read_text().count(" closed ") == 2) or None, 60)
    assert wait_for(lambda: True if not any(Path(f"/proc/{pid}").exists() for pid in pids) else None, 60)
