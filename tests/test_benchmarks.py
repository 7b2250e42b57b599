"""The comparison itself runs: Stoker's cell of benchmarks/pretrain.py at a size for CPUs."""

from __future__ import annotations

import importlib
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


FINE_TUNING = {
    "qlora.py": ("--cells", "tiny:2:64:1:adamw8bit:host:host", "--peers", "stoker,stoker-lora", "--steps", "3"),
    "small_cards.py": ("--dry",),
    "sharded_cards.py": ("--only", "tiny, moments"),
    "qlora_learning.py": ("--size", "tiny", "--context", "32", "--micro", "2", "--steps", "4"),
    "qlora_first.py": ("--size", "tiny", "--context", "256", "--micro", "2", "--rounds", "1", "--ways", "stoker,peft"),
}


@at_length
@pytest.mark.parametrize("name", FINE_TUNING)
def test_a_benchmark_of_fine_tuning_runs_at_a_size_for_cpus(name: str, tmp_path: Path) -> None:
    if name in ("qlora_learning.py", "qlora_first.py"):
        pytest.importorskip("peft", reason="no peft here to compare with")
        pytest.importorskip("bitsandbytes", reason="no bitsandbytes here to compare with")
    command = [sys.executable, str(ROOT / "benchmarks" / name), *FINE_TUNING[name], "--json", str(tmp_path / "rows")]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, check=False, timeout=300)
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert rows and not any("failed" in row for row in rows), done.stdout + done.stderr
    if name == "qlora_learning.py":  # bits are compared on GPUs, whose quantizing ours follows
        assert rows[0]["losses"]["most_apart"] < 1e-3 and rows[0]["ours_in_peft"]["rms"] < 1e-3, rows
    else:
        assert done.returncode == 0, done.stdout + done.stderr


@at_length
def test_many_ranks_lose_a_host_and_go_on_in_the_benchmark(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "many_ranks.py"),
        "--hosts",
        "2",
        "--torch",
        "2",
        "--plain",
        "2",
    ]
    command += ["--seconds", "3", "--json", str(tmp_path / "found.json")]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    torch, plain = json.loads((tmp_path / "found.json").read_text())["found"]
    assert [loss["ranks_left"] for loss in torch["losses"]] == [1, 1] and not plain["losses"]
    assert all(0 < loss["step_next"] <= loss["step_lost"] + 5 for loss in torch["losses"]), torch
    assert 0 < torch["first_line_s"] <= torch["last_line_s"] <= torch["first_step_s"] and plain["coordinator_mb"] < 60


def test_a_planned_micro_batch_is_judged_by_those_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    fit_plan = importlib.import_module("fit_plan")
    for planned, true, verdict in (
        (4, 4, "exact"),
        (4, 5, "one below"),
        (4, 7, "below"),
        (4, 3, "above"),
        (1, 0, "above"),
    ):
        found = fit_plan.true_largest(planned, lambda micro, most=true: micro <= most)
        assert fit_plan.verdict(planned, found) == verdict


@at_length
def test_the_benchmark_of_serving_runs_at_a_size_for_cpus(tmp_path: Path) -> None:
    told = ("--shape", "tiny", "--requests", "6", "--slots", "3", "--shorter", "32", "--rounds", "1")
    command = [sys.executable, str(ROOT / "benchmarks" / "serve.py"), *told, "--json", str(tmp_path / "rows")]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, check=False, timeout=300)
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert done.returncode == 0 and [row["way"] for row in rows] == ["paged", "batches", "generate"], done.stderr
    assert len({row["tokens"] for row in rows}) == 1, rows
