"""Rank 1 raises an exception whose message has 10 MB."""

from moment import fault, guilty
from training import steps

for step in steps():
    if guilty(step):
        fault()
        raise ValueError("size mismatch: " + "x" * 10_000_000)
