"""Rank 1 raises at step 20; the others ignore SIGTERM, catch what losing it raises, and stay."""

import signal
import time

from moment import HANG_S, RANK, fault, guilty
from training import steps


def train() -> None:
    for step in steps():
        if guilty(step):
            fault()
            raise ValueError("boom, and the others won't go")


if RANK == 1:
    train()
else:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        train()
    except RuntimeError as lost:
        print(f"rank {RANK} goes on alone: {lost}", flush=True)
        time.sleep(HANG_S)
