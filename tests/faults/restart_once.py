"""Rank 1 is killed with SIGKILL at step 20 of the first attempt; the second one completes."""

import os
import signal

from moment import ATTEMPT, fault, guilty
from training import steps

for step in steps(40):
    if guilty(step) and ATTEMPT == 0:
        fault()
        os.kill(os.getpid(), signal.SIGKILL)
