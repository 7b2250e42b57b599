"""The agent that is sent to another host: kept there and used again, replaced if it lost files, never run if it did not arrive whole.

There is no other host here: a program that stands in for ssh runs the command in a shell of this machine, with a home of its own.
"""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import Done, Stoker
from stoker.control.cluster import agent_zip
from stoker.control.cluster.ssh import explain_failure

SSH = """#!/bin/sh
for word; do last=$word; done
cd {home} && exec env -i HOME={home} PATH="$PATH" sh -c "$last"
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def far(stoker: Stoker, tmp_path: Path, home: Path) -> Callable[..., Done]:
    """`stoker run` with one other host."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text(SSH.format(home=shlex.quote(str(home))))
    (folder / "ssh").chmod(0o755)
    stoker.env["PATH"] = f"{folder}:{stoker.env['PATH']}"
    script = stoker.script(
        "ok.py", "import os, stoker\nprint('ran from', os.path.dirname(os.path.dirname(stoker.__file__)))\n"
    )

    def run(*more: str, **env: str) -> Done:
        flags = ("--hosts", "far.example", "--python", sys.executable, "--nproc-per-node", "1", "--no-preflight", *more)
        return stoker("run", *flags, script, env=env, timeout=60)

    return run


def agents(home: Path) -> list[Path]:
    return sorted((home / ".cache" / "stoker").glob("agent-*"))


def test_a_kept_agent_is_private_and_used_again(far: Callable[..., Done], home: Path) -> None:
    done = far()
    (base,) = agents(home)
    assert done.code == 0 and f"ran from {base}" in done.out, done.err
    assert stat.S_IMODE((home / ".cache" / "stoker").stat().st_mode) == stat.S_IMODE(base.stat().st_mode) == 0o700
    before = base.stat().st_ino
    assert far().code == 0 and [path.stat().st_ino for path in agents(home)] == [before]


@pytest.mark.parametrize("lost", ["stoker/control/agent/spawn.py", "stoker/contract", "the end of a file"])
def test_an_agent_that_lost_files_is_replaced(far: Callable[..., Done], home: Path, lost: str) -> None:
    assert far().code == 0
    (base,) = agents(home)
    if lost == "the end of a file":
        os.truncate(base / "stoker" / "contract" / "errors.py", 10)
    elif (base / lost).is_dir():
        shutil.rmtree(base / lost)
    else:
        (base / lost).unlink()
    done = far()
    assert done.code == 0 and f"ran from {base}" in done.out and agents(home) == [base], done.err


@pytest.mark.parametrize(
    "change", [lambda data: data[:-1], lambda data: data[:1000] + b"x" + data[1001:], lambda data: b""]
)
def test_what_did_not_arrive_whole_does_not_run(home: Path, change: Callable[[bytes], bytes]) -> None:
    packed = agent_zip.pack_agent()
    code = agent_zip.unpack_code("stoker.control.agent.file_receiver")
    argv = [sys.executable, "-I", "-S", "-c", code, agent_zip.size_and_digest(packed)]
    done = subprocess.run(
        argv, input=change(packed), env={"HOME": str(home)}, capture_output=True, timeout=30, check=False
    )
    assert done.returncode == 1 and agent_zip.DAMAGED in done.stderr.decode() and not (home / ".cache").exists()
    assert "did not arrive whole" in explain_failure("far", done.stderr.decode(), 1)


def test_exactly_these_variables_travel(far: Callable[..., Done], stoker: Stoker) -> None:
    """As docs/cluster.md lists them."""
    travel = ["NCCL_X", "GLOO_X", "TORCH_X", "PYTORCH_X", "CUDA_X", "HF_TOKEN", "OMP_X"]
    stay = ["WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "STOKER_RDZV_SECRET", "HUGGING_FACE_HUB_TOKEN", "MINE"]
    stoker.script("ok.py", "import os\nprint(*sorted(name for name, value in os.environ.items() if value == 'mark'))\n")
    done = far("--env", "GIVEN=mark", **dict.fromkeys([*travel, *stay], "mark"))
    assert done.code == 0 and done.out.removeprefix("CPU0:").split() == sorted([*travel, "GIVEN"]), done.out + done.err
