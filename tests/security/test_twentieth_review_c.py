"""Run names by TAB, and what a server of rollouts may send."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch")

from stoker.cli import completion


def test_a_strangers_run_name_runs_nothing_by_tab(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for name in ("$(touch pwned)", "`touch pwned`", "x$(touch pwned)", "good-1.a_b", ";touch pwned", "a b", "~", "*"):
        (runs / f"20261117-101010-{name}").mkdir(parents=True)
    (tmp_path / "x$(touch pwned)").touch()  # would be put on the line as it is
    script = f'{completion._PREAMBLE["bash"]}\n_stoker_runs ""; _stoker_runs 2026; _stoker_runs x'
    asked = subprocess.run(
        ["bash", "--norc", "-c", script],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "STOKER_RUNS": str(runs)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not (tmp_path / "pwned").exists()
    assert set(asked.stdout.split()) == {"latest", "good-1.a_b", "20261117-101010-good-1.a_b"}
