"""What another user's record may cost us: a line, not the viewer. Work is bounded by the kernel (CPU time and
memory of a child), not by a clock.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

SRC = Path(__file__).parents[2] / "src"
CPU_S, MEMORY = 20, 2 << 30


def bounded(code: str, *words: str) -> str:
    """What that program prints; it ends by a signal, or a MemoryError, where it needs more than that."""

    def limits() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

    argv = [sys.executable, "-c", code, *words]
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run(argv, capture_output=True, text=True, env=env, preexec_fn=limits, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr[-1000:])
    return done.stdout
