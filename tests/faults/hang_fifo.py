"""Rank 1 reads from a pipe that nobody writes to."""

import os
import tempfile

from moment import fault, guilty
from training import steps

for step in steps():
    if guilty(step):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "samples.fifo")
            os.mkfifo(path)
            samples = os.open(path, os.O_RDWR)  # opened for reading alone it would wait in open(), not in read()
            fault()
            os.read(samples, 4096)
