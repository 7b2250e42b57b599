"""Rank 1 runs into a limit of its address space: MemoryError."""

import resource
from pathlib import Path

from moment import fault, guilty
from training import steps

for step in steps():
    if guilty(step):
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + 200_000_000, taken + 200_000_000))
        fault()
        bytes(1_000_000_000)
