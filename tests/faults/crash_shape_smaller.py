"""Rank 1 calls all_reduce with fewer numbers than the others: gloo aborts rank 1, which receives more than it has room for."""

import torch
import torch.distributed as dist
from moment import AT_STEP, RANK, fault
from training import steps

for step in steps():
    if step == AT_STEP:
        if RANK == 1:
            fault()
        dist.all_reduce(torch.ones(7 if RANK == 1 else 1_000_000))
