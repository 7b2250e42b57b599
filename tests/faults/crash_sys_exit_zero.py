"""Rank 1 leaves with sys.exit(0) at step 20: an early return that nobody meant."""

import sys

from moment import fault, guilty
from training import steps

for step in steps():
    if guilty(step):
        fault()
        sys.exit(0)
