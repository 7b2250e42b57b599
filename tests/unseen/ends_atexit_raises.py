"""An atexit handler raises on rank 1 after everything is done; Python prints it and ends with 0, so the job is complete.

class: ends
kind: healthy
ranks: 2
"""

import atexit

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Summary:
    def __init__(self, rank: int) -> None:
        self.losses: list[float] = []
        self.rank = rank
        atexit.register(self.write)

    def write(self) -> None:
        if self.rank == 1:
            raise ValueError("no summary writer")
        print("mean loss", sum(self.losses) / len(self.losses), flush=True)


dist.init_process_group("gloo")
summary = Summary(dist.get_rank())
model = DDP(torch.nn.Linear(12, 2))
opt = torch.optim.SGD(model.parameters(), lr=0.05)
for _ in range(30):
    opt.zero_grad()
    loss = model(torch.randn(3, 12)).square().mean()
    loss.backward()
    opt.step()
    summary.losses.append(loss.item())
dist.destroy_process_group()
