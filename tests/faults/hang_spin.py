"""Rank 1 spins at step 20: a loop whose condition never changes, at full CPU."""

from moment import fault, guilty
from training import steps

for step in steps():
    if guilty(step):
        fault()
        while True:
            pass
