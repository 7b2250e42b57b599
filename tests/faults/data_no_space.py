"""Rank 1 writes its log file to a full disk. The argument is the folder of a small disk; without one it is /dev/full."""

import sys

from moment import fault, guilty
from training import steps

path = f"{sys.argv[1]}/metrics.bin" if len(sys.argv) > 1 else "/dev/full"
for step in steps():
    if guilty(step):
        fault()
        with open(path, "wb", buffering=0) as file:
            for _ in range(64):
                file.write(bytes(1_000_000))
