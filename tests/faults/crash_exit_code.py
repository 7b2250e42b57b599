"""Rank 1 ends itself with exit code 3 at step 20."""

import sys

from moment import fault, guilty
from training import steps

for step in steps():
    if guilty(step):
        fault()
        sys.exit(3)
