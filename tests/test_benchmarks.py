"""The comparison itself runs: Stoker's cell of benchmarks/pretrain.py at a size for CPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import at_length

pytest.importorskip("torch")
pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parent.parent


@at_length
def test_the_pretraining_benchmark_measures_stokers_cell(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "pretrain.py"),
        "--sizes",
        "T",
        "--peers",
        "stoker",
        "--rounds",
        "1",
        "--compile",
        "off",
        "--json",
        str(tmp_path / "cells.jsonl"),
        "--commit",
        "test",
        "--scratch",
        str(tmp_path),
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (cell,) = [json.loads(line) for line in (tmp_path / "cells.jsonl").read_text().splitlines()]
    assert cell["peer"] == "stoker" and len(cell["losses"]) == 8
    assert cell["losses"][-1] < cell["losses"][0] and cell["tok_s"] > 0
