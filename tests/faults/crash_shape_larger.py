"""Rank 1 calls all_reduce with more numbers than the others: gloo aborts the others, who did nothing wrong."""

import torch
import torch.distributed as dist
from moment import AT_STEP, RANK, fault
from training import steps

for step in steps():
    if step == AT_STEP:
        if RANK == 1:
            fault()
        dist.all_reduce(torch.ones(1_000_000 if RANK == 1 else 7))
