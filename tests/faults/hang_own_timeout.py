"""Rank 1 sleeps, and the process group's own timeout is 8 s: the waiting ranks raise, though they did nothing wrong."""

import time

from moment import HANG_S, fault, guilty
from training import steps

for step in steps(timeout_s=8):
    if guilty(step):
        fault()
        time.sleep(HANG_S)
