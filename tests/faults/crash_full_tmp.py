"""The disk with the temporary files is full when rank 1 raises: the exception is the cause, not the disk."""

import os
import sys

from moment import fault, guilty
from training import steps

for step in steps():
    if guilty(step):
        fault()
        with open(os.path.join(sys.argv[1], "filler"), "wb", buffering=0) as file:
            while True:
                try:
                    file.write(bytes(1 << 16))
                except OSError:
                    break
        raise ValueError("boom")  # line: full-tmp
