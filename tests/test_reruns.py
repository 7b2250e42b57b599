"""Retries have one level and a budget, and each is listed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import at_length_but

TESTS = Path(__file__).parent
UNLUCKY = """
import pathlib, pytest

@pytest.fixture
def stoker(tmp_path):
    return tmp_path

@pytest.mark.parametrize("number", range({count}))
def test_fails_once(stoker, number):
    tried = pathlib.Path(__file__).with_name(f"tried-{{number}}")
    if not tried.exists():
        tried.touch()
        raise AssertionError("the first time")
"""


@pytest.mark.parametrize("workers", at_length_but(["-n0", "--workers=2"], ["-n0", "-n2", "--workers=2"]))
@pytest.mark.parametrize(("count", "code"), [(3, 0), (4, 1)])
def test_reruns_are_listed_and_too_many_fail_the_run(tmp_path: Path, count: int, code: int, workers: str) -> None:
    pytest.importorskip("pytest_rerunfailures")
    pytest.importorskip("xdist")
    (tmp_path / "conftest.py").write_text(
        f"import sys\nsys.path.insert(0, {str(TESTS)!r})\nimport reruns\nreruns.DELAY_S = 0\nfrom reruns import *\nfrom workers import *\npytest_collection_modifyitems = may_run_again\n"
    )
    (tmp_path / "test_unlucky.py").write_text(UNLUCKY.format(count=count))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            workers,
            "-p",
            "no:cacheprovider",
            "--rootdir",
            tmp_path,
            tmp_path,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout
    listed = re.findall(r"^rerun: test_unlucky.py::test_fails_once\[(\d)\]$", done.stdout, re.M)
    assert sorted(map(int, listed)) == list(range(count)), done.stdout
    assert (f"{count} reruns, more than 3" in done.stdout) == bool(code)


def test_no_other_retry_is_used() -> None:
    """pytest's marker is set in reruns.py alone. (A loop that tries again can't be found by its text.)"""
    words = re.compile(r"mark\.flaky|reruns=|--reruns|only_rerun")
    users = {path.name for path in TESTS.rglob("*.py") if words.search(path.read_text())}
    assert users == {"reruns.py", Path(__file__).name}
    assert not words.search((TESTS.parent / "pyproject.toml").read_text() + (TESTS.parent / "test.sh").read_text())
