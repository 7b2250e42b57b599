"""4 ranks in groups [0, 1] and [2, 3]: rank 3 sleeps instead of joining its group's all-reduce, and in the end everybody waits."""

import time

import torch
import torch.distributed as dist
from moment import AT_STEP, HANG_S, RANK, fault, guilty
from training import steps

for step in steps():
    if step == 0:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    if guilty(step, rank=3):
        fault()
        time.sleep(HANG_S)
    if step == AT_STEP:
        dist.all_reduce(torch.ones(4), group=groups[RANK // 2])
