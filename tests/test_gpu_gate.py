"""`bash test.sh --gpu`: it refuses without a GPU, runs each test once, fails if one fails, and says at which commit."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shards import share

ROOT = Path(__file__).parents[1]
CONFTEST = """
from shards import keep_share

def pytest_addoption(parser):
    parser.addoption("--gpu-shard", default="")

def pytest_configure(config):
    config.addinivalue_line("markers", "gpu(seconds)")

def pytest_collection_modifyitems(config, items):
    keep_share(config, items)
"""
TESTS = """
import os, pytest

@pytest.mark.gpu(seconds=2)
@pytest.mark.parametrize("number", range(5))
def test_some(number):
    with open({seen!r}, "a") as seen:
        seen.write(f"{{number}} on {{os.environ['STOKER_TEST_DEVICE']}}\\n")
    assert number != {bad}

@pytest.mark.gpu
def test_left_out():
    pytest.skip("no kernel for this card")

@pytest.fixture
def real(): assert False, "the gate leaves out what locks the GPU"

@pytest.mark.gpu
def test_alone(real): pass

def test_elsewhere(): assert False, "not marked"
"""
GIT = ("git", "-c", "user.name=x", "-c", "user.email=x@y", "-c", "commit.gpgsign=false")


def run_gate(folder: Path, bad: int = -1, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the real test.sh and runner over a folder of stand-in tests, on the CPU."""
    (folder / "tests").mkdir(parents=True)
    for name in ("test.sh", "tests/gpu_gate.py", "tests/shards.py"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "tests" / "conftest.py").write_text(CONFTEST)
    (folder / "tests" / "test_some.py").write_text(TESTS.format(seen=str(folder / "seen"), bad=bad))
    (folder / "setup.sh").write_text("echo setup.sh was started; exit 1\n")
    return again(folder, **env)


def again(folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    given = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "HOME": str(folder), "STOKER_TEST_DEVICE": "cpu", **env}
    return subprocess.run(["bash", folder / "test.sh", "--gpu"], env=given, capture_output=True, text=True, check=False)


def test_each_test_is_in_one_share_and_the_shares_are_even() -> None:
    costs = [150.0, *[3.0] * 80, *[24.0] * 16, 8.0]
    for count in (1, 2, 8):
        shares = [share(costs, number, count) for number in range(count)]
        assert sorted(place for one in shares for place in one) == list(range(len(costs)))
        loads = [sum(costs[place] for place in one) for one in shares]
        assert max(loads) <= max(150.0, sum(costs) / count + 24.0)


def test_the_gate_runs_each_test_once_and_ends_with_the_commit(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    folder = tmp_path / "checkout"
    done = run_gate(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = (folder / "seen").read_text().splitlines()
    assert sorted(seen) == [f"{number} on cpu" for number in range(5)]
    last = done.stdout.rstrip().splitlines()[-1]
    assert "5 passed" in last and "1 skipped" in last and "unknown commit" in last and re.search(r"in \d+ s", last)
    assert "no kernel for this card" in done.stdout and "setup.sh was started" not in done.stdout
    for command in (("git", "init", "-q"), (*GIT, "add", "-A"), (*GIT, "commit", "-qm", "x")):
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    head = subprocess.run(("git", "rev-parse", "HEAD"), cwd=folder, check=True, capture_output=True, text=True)
    assert f"commit {head.stdout.strip()} with uncommitted changes" in again(folder).stdout.splitlines()[-1]


def test_the_gate_fails_if_a_test_fails_and_prints_its_output(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    done = run_gate(tmp_path / "checkout", bad=3)
    assert done.returncode == 1 and "assert 3 != 3" in done.stdout, done.stdout + done.stderr
    last = done.stdout.rstrip().splitlines()[-1]
    assert "FAILED" in last and "1 failed" in last and "4 passed" in last


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ({"STOKER_TEST_DEVICE": "cuda", "CUDA_VISIBLE_DEVICES": ""}, "sees no GPU"),
        ({"PYTHON": "/nowhere/python3"}, "no /nowhere/python3"),
    ],
)
def test_the_gate_is_refused_in_one_line_where_it_can_not_run(env: dict[str, str], why: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    done = run_gate(tmp_path / "checkout", **env)
    assert done.returncode == 69 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and why in done.stderr, done.stderr


def test_the_tests_start_where_pytest_has_no_plugins() -> None:
    without = [word for plugin in ("timeout", "rerunfailures", "xdist") for word in ("-p", f"no:{plugin}")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *without, "tests/test_gpu_gate.py", "-k", "share"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
