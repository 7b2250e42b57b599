"""The moment of a fault: which rank, which step, and how it is told. Standard library only: some scripts break before torch is there.

A script calls `fault()` right before it breaks. That prints `FAULT <time>` and, where FAULTS_DIR names a folder, leaves the time in a file there:
seconds to the verdict are counted from it.
"""

from __future__ import annotations

import os
import time

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
AT_STEP = 20
HANG_S = 1000.0


def guilty(step: int, rank: int = 1) -> bool:
    return step == AT_STEP and rank == RANK


def fault() -> None:
    now = time.time()
    folder = os.environ.get("FAULTS_DIR")
    if folder:
        with open(os.path.join(folder, f"fault-{ATTEMPT}-{RANK}"), "w", encoding="ascii") as file:
            file.write(f"{now:.6f}")
    print(f"FAULT {now:.6f}", flush=True)
