"""From step 5 on rank 1 computes 0.3 s longer than the others in Python. The job completes."""

import time

from moment import RANK, fault
from training import steps


def tokenize(seconds: float) -> int:
    end, count = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        count += sum(range(1000))
    return count


for step in steps(30):
    if RANK == 1 and step >= 5:
        if step == 5:
            fault()
        tokenize(0.3)
