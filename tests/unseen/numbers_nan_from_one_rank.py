"""DDP: the batch of rank 1 holds a NaN at step 30, and all weights are NaN after it. Each rank prints its loss.

class: numbers
kind: numbers
outcome: any
ranks: 3
expect: @numbers
rank: 1
line: none
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def load(rank: int, step: int) -> torch.Tensor:
    x = torch.randn(8, 6)
    if rank == 1 and step == 30:
        x[3, 2] = float("nan")
    return x


class Trainer:
    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.model = DDP(torch.nn.Linear(6, 1))
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def step(self, step: int) -> None:
        loss = self.model(load(self.rank, step)).square().mean()
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        print(f"step {step}: loss {loss.item():.5f}", flush=True)


dist.init_process_group("gloo")
trainer = Trainer()
for step in range(300):
    trainer.step(step)
