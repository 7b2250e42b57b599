"""Rank 1 asks torch for a CPU tensor of 4 TB: no MemoryError, but a RuntimeError of torch's CPU allocator."""

import torch
from moment import fault, guilty
from training import steps

for step in steps():
    if guilty(step):
        fault()
        torch.empty(1_000_000_000_000)
