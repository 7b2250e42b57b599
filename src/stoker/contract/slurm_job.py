"""Describes a Slurm job, and runs Slurm's programs."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from stoker.contract.frozen import frozen

COMMAND_S = 20.0

# `stoker submit` keeps job scripts, output and a record of each job in this folder of the runs folder.
FOLDER = "slurm"
NOTICE = ".notice"  # suffix of a file that the job's script writes when Slurm announces the end of the job

_ENDED = (
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
)


@frozen
class SlurmJob:
    id: str  # 12, or 12_3 for a task of an array
    state: str  # PENDING, RUNNING, COMPLETING, CANCELLED, TIMEOUT ...
    reason: str = ""  # why the job waits or ended
    exit_code: int = 0  # the job script's
    signal: int = 0  # the signal that ended it
    restarts: int = 0
    nodes: str = ""
    limit: str = ""  # its time limit
    by: str = ""  # the user who cancelled it, if accounting knows
    noticed: bool = False  # Slurm announced its end to the script, and the run was stopped to let it save

    @property
    def is_over(self) -> bool:
        return self.state in _ENDED

    @property
    def code(self) -> int:
        """Return the exit code as a shell reports it."""
        return 128 + self.signal if self.signal else self.exit_code


def run_slurm(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv, capture_output=True, text=True, errors="replace", timeout=COMMAND_S, check=False, stdin=subprocess.DEVNULL
    )
