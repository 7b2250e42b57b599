"""Rank 1 takes another branch at step 20: one small all-reduce more than the others, who go on with their step. gloo aborts rank 1."""

import torch
import torch.distributed as dist
from moment import fault, guilty
from training import steps

for step in steps():
    if guilty(step):
        fault()
        dist.all_reduce(torch.ones(4))
