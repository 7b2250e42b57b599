"""Never steps: an evaluation that computes and gathers, batch after batch, some of them long."""

import torch
import torch.distributed as dist
from training import RANK, arguments, busy, finish

told = arguments(seconds=0.3, long=10.0, batches=50)
dist.init_process_group("gloo")
for batch in range(told.batches):
    busy(told.long if batch == told.batches // 2 else told.seconds)
    score = torch.tensor([float(batch)])
    dist.all_reduce(score)
    if RANK == 0 and batch % 10 == 0:
        print(f"batch {batch}: score {score.item():.1f}")
finish()
