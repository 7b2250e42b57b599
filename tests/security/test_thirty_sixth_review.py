"""What the thirty-sixth review found."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# ---- setup.sh ----


@pytest.mark.parametrize("before", [None, 0o644])
def test_the_lock_of_a_setup_is_closed_to_who_may_only_read(tmp_path: Path, before: int | None) -> None:
    """Another user's flock on a file that they can read had `bash setup.sh` wait without end."""
    for name in ("setup.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    lock = tmp_path / ".venv.lock"
    if before is not None:
        lock.touch()
        lock.chmod(before)
    held = tmp_path / "held"  # the setup ends at its first step behind the lock
    (tmp_path / "flock").write_text(f"#!/bin/sh\nstat -L -c %a /proc/self/fd/9 > {held}\nkill $PPID\n")
    (tmp_path / "flock").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable}
    subprocess.run(["bash", "-c", "umask 022 && exec bash setup.sh"], cwd=tmp_path, env=env, check=False, timeout=60)
    assert held.read_text() == "600\n"
