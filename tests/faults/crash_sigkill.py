"""Rank 1 is killed with SIGKILL at step 20, and memory was not short."""

import os
import signal

from moment import fault, guilty
from training import steps

for step in steps():
    if guilty(step):
        fault()
        os.kill(os.getpid(), signal.SIGKILL)
