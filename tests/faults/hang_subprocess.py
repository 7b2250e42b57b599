"""Rank 1 waits for a program that never ends."""

import subprocess

from moment import HANG_S, fault, guilty
from training import steps

for step in steps():
    if guilty(step):
        fault()
        subprocess.run(["sleep", str(HANG_S)], check=True)
