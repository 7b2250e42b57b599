"""Rank 1 raises at step 20."""

from moment import fault, guilty
from training import steps

for step in steps():
    if guilty(step):
        fault()
        raise ValueError("boom at step 20")
