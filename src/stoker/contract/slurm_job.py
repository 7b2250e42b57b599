"""A Slurm job as Slurm itself describes it, and how one of its programs is asked."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from stoker.contract.frozen import frozen

ASK_S = 20.0

# What `stoker submit` keeps in the runs folder: job scripts, the jobs' output, and its own note of each.
FOLDER = "slurm"
NOTICE = ".notice"  # made by the job's script when Slurm has told it that its end is near

OVER = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
        "TIMEOUT")  # fmt: skip


@frozen
class SlurmJob:
    id: str  # 12, or 12_3 for a task of an array
    state: str  # PENDING, RUNNING, COMPLETING, CANCELLED, TIMEOUT ...
    reason: str = ""  # why it waits, or why it ended
    exit_code: int = 0  # of the job script
    signal: int = 0  # that ended it
    restarts: int = 0
    nodes: str = ""
    limit: str = ""  # its time limit
    by: str = ""  # who cancelled it, where accounting knows
    noticed: bool = False  # Slurm told its script that the end is near, and the run was stopped so that it could save

    @property
    def over(self) -> bool:
        return self.state in OVER

    @property
    def code(self) -> int:
        """As a shell would have it."""
        return 128 + self.signal if self.signal else self.exit_code


def run_slurm(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv, capture_output=True, text=True, errors="replace", timeout=ASK_S, check=False, stdin=subprocess.DEVNULL
    )
