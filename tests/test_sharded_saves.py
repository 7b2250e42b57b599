"""Ranks that are killed or stall while a model in shards is saved: a short run of the benchmark that counts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from conftest import at_length

ROOT = Path(__file__).parents[1]


@at_length
def test_a_rank_that_dies_or_stalls_in_a_sharded_save_is_named_and_nothing_is_lost(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "sharded_saves.py"), "--ranks", "2", "--kills", "2"]
    command += ["--stalls", "1", "--steps", "12", "--json", str(tmp_path / "told.json")]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "told.json").read_text())
    assert sorted(trial["kind"] for trial in told["trials"]) == ["kill", "kill", "stall"] and told["runs"] >= 1
    for trial in told["trials"]:
        assert trial["named"] == trial["rank"] and trial["resumed"] >= trial["complete"] > 0, trial
        assert trial["cause"] == {"kill": "rank.killed", "stall": "hang.stopped"}[trial["kind"]]
