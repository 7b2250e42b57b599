"""Trains, evaluates for long, trains on. Marked with stoker.phase or not; on all ranks, or on rank 0 while the others wait in a barrier."""

import torch.distributed as dist
from training import RANK, Tiny, arguments, finish, phase, spend

told = arguments(seconds=12.0, how="busy", who="all", marked="no", times=2, steps=60)
tiny = Tiny()
for _ in range(told.times):
    tiny.train(told.steps)
    phase("eval", told.marked)
    if told.who == "all" or RANK == 0:
        spend(told.seconds, told.how)
    dist.barrier()
    phase("train", told.marked)
tiny.train(told.steps)
finish()
