"""Rank 1 raises at step 20, two seconds after the others have begun to wait for it in the all-reduce."""

import time

from moment import fault, guilty
from training import steps

for step in steps():
    if guilty(step):
        time.sleep(2)
        fault()
        raise ValueError("boom while the others wait")
