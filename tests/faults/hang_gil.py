"""Native code in rank 1 holds the GIL and never comes back: no Python thread of the rank runs any more."""

import ctypes

from moment import HANG_S, fault, guilty
from training import steps

for step in steps():
    if guilty(step):
        fault()
        ctypes.PyDLL(None).sleep(int(HANG_S))
