"""Rank 1 is stopped by SIGSTOP at step 20."""

import os
import signal

from moment import fault, guilty
from training import steps

for step in steps():
    if guilty(step):
        fault()
        os.kill(os.getpid(), signal.SIGSTOP)
