"""Somebody else sends SIGTERM to rank 1 alone at step 20."""

import os
import subprocess
import time

from moment import HANG_S, fault, guilty
from training import steps

for step in steps():
    if guilty(step):
        fault()
        subprocess.run(["kill", "-TERM", str(os.getpid())], check=True)
        time.sleep(HANG_S)
