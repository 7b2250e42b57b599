"""Rank 1 raises at step 20 in every attempt: trying again can't help."""

from moment import fault, guilty
from training import steps

for step in steps():
    if guilty(step):
        fault()
        raise ValueError("the same at the same step every time")
