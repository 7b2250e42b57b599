"""Rank 1 sleeps at step 20 and the others wait for it."""

import time

from moment import HANG_S, fault, guilty
from training import steps

for step in steps():
    if guilty(step):
        fault()
        time.sleep(HANG_S)
