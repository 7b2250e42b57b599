"""Rank 1 saves a checkpoint of 64 MB to a full disk: torch says "unexpected pos" or "file write failed", and nothing of space.

The argument is the folder of a small disk; without one it is /dev/full.
"""

import sys

import torch
from moment import fault, guilty
from training import steps

path = f"{sys.argv[1]}/checkpoint.pt" if len(sys.argv) > 1 else "/dev/full"
for step in steps():
    if guilty(step):
        fault()
        torch.save({"weights": torch.zeros(16_000_000)}, path)
