"""What the machine says of itself in words of its own: cgroups around cgroups, the kernel's PCI addresses, who waits for whom in a subgroup."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import Stoker
from stoker.contract import host_memory, kernel_messages
from stoker.contract.layout import scratch_files
from stoker.control.doctor import stale_files
from stoker.control.machine import host_limits, kernel_log


@pytest.mark.parametrize(
    ("pci", "where", "same"),
    [
        ("00000000:3B:00.0", "0000:3b:00", True), ("00000000:3b:00.0", "0000:3b:00.0", True), ("00000000:3b:00.0", "0000:5e:00", False),
        ("", "0000:3b:00", False), ("00000000:3b:00.0", "", False),
    ],
)  # fmt: skip
def test_a_card_is_found_in_the_kernels_log(pci: str, where: str, same: bool) -> None:
    assert kernel_log.is_same_gpu(pci, where) == same
    if same and "." not in where:
        found = kernel_messages.parse_xid(f"NVRM: Xid (PCI:{where}): 79, pid=1234, GPU has fallen off the bus.")
        assert found == (where, 79) and kernel_log.is_same_gpu(pci, found[0])


def test_the_tightest_of_the_cgroups_around_a_process_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's limit is on the job's step, and the process is in a task below it; a pod's CPU quota is on its container."""
    root, told = tmp_path / "cgroup", tmp_path / "told"
    task = root / "job_7" / "step_0" / "user" / "task_0"
    task.mkdir(parents=True)
    (root / "cgroup.controllers").write_text("cpu memory")
    told.write_text("0::/job_7/step_0/user/task_0\n")
    for folder, limit in (
        (task, "max"),
        (task.parent, "max"),
        (root / "job_7" / "step_0", "8000000000"),
        (root / "job_7", "9000000000"),
    ):
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text("3000000000")
        (folder / "memory.stat").write_text("inactive_file 1000000000\n")
    (root / "job_7" / "cpu.max").write_text("150000 100000")
    (task / "cpu.max").write_text("max 100000")
    dirs = host_memory.find_cgroup_dirs
    for module in (host_limits, host_memory):
        monkeypatch.setattr(module, "find_cgroup_dirs", lambda controller: dirs(controller, str(root), str(told)))
    assert host_memory.read_cgroup_memory() == (8_000_000_000, 2_000_000_000)
    assert host_limits._read_quotas(*host_memory.find_cgroup_dirs("cpu")) == [2] and host_limits.count_cores() <= 2
    told.write_text("0::/../elsewhere\n")
    assert host_memory.find_cgroup_dirs("memory")[0] == [str(root)], "a container sees its own root"


def test_every_file_of_a_rank_is_an_agents() -> None:
    assert all(stale_files._AGENT_FILE.fullmatch(name) for name in scratch_files("0-12").values())
    assert not stale_files._AGENT_FILE.fullmatch("notes.txt")


PRINTS = "import sys; print('to stdout', flush=True); print('to stderr', file=sys.stderr, flush=True)"


def test_torchruns_output_flags_count_local_ranks_and_a_tee_is_shown(stoker: Stoker) -> None:
    script = stoker.script("prints.py", PRINTS)
    done = stoker("run", "--nproc-per-node", "2", "-r", "3", "-t", "1", "--log-dir", "logs", script)
    assert done.code == 0 and done.out.count("to stdout") == 2 and "to stderr" not in done.out + done.err, done.out
    where = (
        "--nnodes",
        "2",
        "--node-rank",
        "1",
        "--nproc-per-node",
        "2",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        "29519",
    )
    done = stoker("run", *where, "--local-ranks-filter", "0", script)
    assert done.code == 0 and done.out.count("to stdout") == 1, done.out + done.err
    done = stoker("run", *where, "-r", "0:3", "--log-dir", "ld", script)
    assert done.code == 0 and done.out.count("to stdout") == 1
    assert [path.read_text() for path in sorted((stoker.cwd / "ld").glob("*/attempt_0/0/stdout.log"))] == [
        "to stdout\n"
    ]


def test_another_python_may_have_the_module(stoker: Stoker) -> None:
    other = stoker.cwd / "python"
    other.write_text('#!/bin/sh\necho "asked: $@"\n')
    other.chmod(0o755)
    done = stoker("run", "--python", str(other), "-m", "only_there")
    assert done.code == 0 and "asked: -m only_there" in done.out, done.err


def test_a_terminal_without_the_characters_gets_no_traceback(stoker: Stoker) -> None:
    done = stoker("doctor", "--only", "host.cores", env={"PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"})
    assert "Traceback" not in done.err, done.err
