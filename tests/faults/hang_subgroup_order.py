"""Two groups of the same ranks, entered in opposite order: rank 0 waits in the first, rank 1 in the second."""

import torch
import torch.distributed as dist
from moment import AT_STEP, RANK, WORLD, fault
from training import steps

for step in steps():
    if step == 0:
        groups = [dist.new_group(list(range(WORLD))), dist.new_group(list(range(WORLD)))]
    if step == AT_STEP:
        if RANK == 1:
            fault()
        for group in groups[::-1] if RANK == 1 else groups:
            dist.all_reduce(torch.ones(4), group=group)
