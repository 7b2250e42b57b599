"""A named pipe or an odd file where the launcher reads or writes one: it is not waited for, and ends nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import Stoker
from stoker.control.plan.run_json import git_revision


def test_a_named_pipe_as_head_does_not_hold_the_launcher_up(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    os.mkfifo(tmp_path / ".git" / "HEAD")
    code = f"from stoker.control.plan.run_json import git_revision; print(git_revision({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout == "None\n", done.stderr


def test_an_error_file_that_is_a_pipe_is_not_waited_for(stoker: Stoker) -> None:
    os.mkfifo(stoker.cwd / "pipe")
    stoker.script("fail.py", "raise SystemExit(3)\n")
    done = stoker("run", "fail.py", env={"TORCHELASTIC_ERROR_FILE": str(stoker.cwd / "pipe")}, timeout=60)
    assert done.code == 3 and "TORCHELASTIC_ERROR_FILE" in done.err


@pytest.mark.parametrize("head", [b"\xff\xfe\x00", b"ref: refs/none", b"\x1b]0;owned\x07", b""])
def test_a_git_folder_without_a_commit_has_no_revision(tmp_path: Path, head: bytes) -> None:
    (tmp_path / ".git" / "refs").mkdir(parents=True)
    (tmp_path / ".git" / "HEAD").write_bytes(head)
    assert git_revision(str(tmp_path)) is None
