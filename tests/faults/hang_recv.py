"""Rank 0 waits to receive from rank 1, which never sends: it went on to its next step and waits there."""

import torch
import torch.distributed as dist
from moment import AT_STEP, RANK, fault
from training import steps

for step in steps():
    if step == AT_STEP and RANK == 1:
        fault()
    if step == AT_STEP and RANK == 0:
        dist.recv(torch.empty(4), src=1)
