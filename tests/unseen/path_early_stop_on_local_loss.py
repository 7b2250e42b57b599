"""Early stopping looks at the local loss: one rank leaves the loop and gathers its results while the others train on.

class: common-path
kind: hang
ranks: 3
expect: @diverged
rank: 2
line: required
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class EarlyStopping:
    def __init__(self, patience: int) -> None:
        self.best, self.bad, self.patience = float("inf"), 0, patience

    def should_stop(self, loss: float) -> bool:
        if loss < self.best - 1e-4:
            self.best, self.bad = loss, 0
        else:
            self.bad += 1
        return self.bad >= self.patience


def collect(result: dict) -> list:
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, result)  # FAULT
    return everyone


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(30, 1))
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
stopper = EarlyStopping(patience=3)
for epoch in range(60):
    x = torch.ones(8, 30)
    target = torch.full((8, 1), 5.0 if rank != 2 else -5.0)  # this shard fits worse and worse
    loss = (model(x) - target).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if epoch > 10 and stopper.should_stop(loss.item()):
        print(f"rank {rank}: early stopping in epoch {epoch}", flush=True)
        break
results = collect({"rank": rank, "best": stopper.best})  # NEAR
dist.destroy_process_group()
