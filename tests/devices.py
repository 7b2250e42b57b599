"""The device of tests that run on a GPU and, as well, on a CPU: STOKER_TEST_DEVICE, else CUDA where there is a GPU.

`bash test.sh --gpu` runs the tests that are marked `gpu`; tests/gpu_gate.py starts them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Iterable
from typing import Any

import pytest

from conftest import EVERYTHING, GPU_HERE, Done, Stoker
from forked_recipes import trained

DEVICE = os.environ.get("STOKER_TEST_DEVICE") or ("cuda" if GPU_HERE else "cpu")
ON_GPU = DEVICE == "cuda"
LONG_S = 280.0  # the first kernels of a process are compiled


def cases(default: Collection[Any], seconds: float, some: Iterable[Any]) -> list[Any]:
    """Return all cases, marked `gpu`; on a CPU only those of `default` run, and the others with --all.

    `seconds` is what one takes on a GPU, about; the gate deals its tests out by it.
    """
    marks = [pytest.mark.gpu(seconds=seconds)]
    later = pytest.mark.skipif(not (ON_GPU or EVERYTHING), reason="runs with: bash test.sh --all, or on a GPU")
    return [pytest.param(*case, marks=marks + ([] if case in default else [later])) for case in some]


def needs_gpu(function: Any) -> Any:
    """Mark a test that runs on a GPU only."""
    import torch

    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")
    return pytest.mark.gpu(skip(function))


def train(stoker: Stoker, stage: str, name: str, *settings: str) -> Done:
    """Run a stage's recipe on DEVICE in a process of its own, as torchrun starts it; raise where it fails.

    Without the launcher several of them may use one GPU at a time. A process that has a GPU is never forked.
    """
    words = [f"--parallel.device={DEVICE}", *settings]
    if not ON_GPU:
        done = trained(stoker, ["train", stage, "--name", name, *words])
        assert done.code == 0, done.out[-6000:]
        return done
    folder = stoker.cwd / f"rank-{name}"
    folder.mkdir()
    ended = subprocess.run(
        [sys.executable, "-m", f"stoker.training.recipes.{stage}", *words],
        cwd=folder,
        env={name: value for name, value in stoker.env.items() if name != "STOKER_MACHINE"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        timeout=LONG_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout.decode("utf-8", "replace")[-6000:]
    (run,) = (folder / "runs").glob("torchrun-*")
    (stoker.cwd / "runs").mkdir(exist_ok=True)
    run.rename(stoker.cwd / "runs" / f"forked-{name}")
    return Done(ended.returncode, ended.stdout, ended.stdout, stoker.cwd)
