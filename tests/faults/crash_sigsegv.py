"""Native code in rank 1 reads address 0 at step 20."""

import ctypes

from moment import fault, guilty
from training import steps

for step in steps():
    if guilty(step):
        fault()
        ctypes.string_at(0)
