"""Rank 1 sleeps before it reaches init_process_group; the others wait for it in the store."""

import time

from moment import HANG_S, RANK, fault
from training import steps

if RANK == 1:
    fault()
    time.sleep(HANG_S)
for _ in steps():
    pass
