"""Rank 1 leaves with os._exit(0) at step 20, as if it were done."""

import os

from moment import fault, guilty
from training import steps

for step in steps():
    if guilty(step):
        fault()
        os._exit(0)
