"""os._exit(5) on rank 0, in the middle of training.

class: ends
kind: crash
ranks: 2
expect: rank.exit
rank: 0
line: none
"""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def watch_budget(step: int) -> None:
    if int(os.environ["RANK"]) == 0 and step >= 25:
        print("out of budget", flush=True)
        os._exit(5)


dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(12, 2))
opt = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(100):
    opt.zero_grad()
    model(torch.randn(3, 12)).square().mean().backward()
    opt.step()
    watch_budget(step)
