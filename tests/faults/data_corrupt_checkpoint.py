"""Rank 1 loads a checkpoint of torch.save that was cut off while it was written."""

import os
import tempfile

import torch
from moment import fault, guilty
from training import steps

for step in steps():
    if guilty(step):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "checkpoint.pt")
            torch.save({"weight": torch.zeros(1000, 100)}, path)
            os.truncate(path, 100_000)
            fault()
            torch.load(path)
