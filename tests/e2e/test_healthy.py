"""No false alarm: healthy runs of varied shape are neither stopped nor blamed. `bash test.sh --all` runs all shapes, benchmarks/healthy.py all at full length."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from conftest import Stoker, at_length_but
from healthy.outcome import Outcome, outcome
from healthy.shapes import HERE, SHAPES, Shape

SCALE = 0.1  # of every pause; the 60 s evaluation becomes 6 s
HANG_TIMEOUT = "20s"  # above the longest of them and what two cores need to import torch
CHOSEN = [shape for shape in SHAPES if shape.in_ci]


@contextmanager
def busy_neighbours(count: int) -> Iterator[None]:
    spin = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
    started = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def can_spy() -> bool:
    program = Path(sys.executable).with_name("py-spy")
    if not program.exists():
        return False
    command = [program, "dump", "--nonblocking", "--pid", str(os.getpid())]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("shape", at_length_but(CHOSEN, SHAPES), ids=lambda shape: shape.name)
def test_it_is_left_alone(stoker: Stoker, shape: Shape) -> None:
    if shape.needs_py_spy and not can_spy():
        pytest.skip("py-spy may not read other processes here")
    words = shape.command(seed=1, scale=SCALE)
    timeout = HANG_TIMEOUT if shape.hang_timeout_s is None else f"{shape.hang_timeout_s:g}s"
    with busy_neighbours(shape.neighbours):
        done = stoker.torch("run", "--nproc-per-node", str(shape.ranks), "--hang-timeout", timeout, *words)
    assert done.code == 0, done.out + done.err
    assert outcome(done.run_dir).wrong(shape.straggler) == []


def test_a_wrong_outcome_is_seen() -> None:
    fine = Outcome("completed", "", False, ("hang.sleep, rank 0: …",), ())
    assert fine.wrong(straggler_is_right=False) == []
    assert replace(fine, stopped=True).wrong(False) == ["stopped"]
    assert replace(fine, status="failed", summary="rank 1 hangs").wrong(False) == ["blamed: failed: rank 1 hangs"]
    named = replace(fine, stragglers=("slow.rank, rank 2: …",))
    assert len(named.wrong(straggler_is_right=False)) == 1 and named.wrong(straggler_is_right=True) == []


def test_every_script_is_in_the_table() -> None:
    scripts = {path.name for path in Path(HERE).glob("*.py")} - {
        "__init__.py",
        "shapes.py",
        "outcome.py",
        "training.py",
    }
    assert {shape.script for shape in SHAPES} == scripts
    assert len({shape.name for shape in SHAPES}) == len(SHAPES)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_its_arguments_are_ones_its_script_takes(shape: Shape) -> None:
    """A wrong flag would end the run at once, and a benchmark of 15 minutes with it."""
    tree = ast.parse((HERE / shape.script).read_text())
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "arguments"
    ]
    taken = {str(keyword.arg) for keyword in calls[0].keywords}
    assert {word[2:].replace("-", "_") for word in shape.args.split() if word.startswith("--")} <= taken
