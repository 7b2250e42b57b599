"""breakpoint() on every rank, and none of them has a terminal."""

from moment import AT_STEP, fault
from training import steps

for step in steps():
    if step == AT_STEP:
        fault()
        breakpoint()  # line: breakpoint
        print("after the breakpoint", flush=True)
