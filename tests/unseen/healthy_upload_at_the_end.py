"""Training is done, three ranks have ended, and rank 0 uploads its checkpoint for 12 s more.

class: healthy
kind: healthy
ranks: 4
"""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def upload(chunks: int) -> None:
    for _ in range(chunks):
        time.sleep(0.5)


dist.init_process_group("gloo")
rank = dist.get_rank()
model = DDP(torch.nn.Linear(8, 8))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(60):
    opt.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    opt.step()
dist.destroy_process_group()
if rank == 0:
    upload(24)
    print("uploaded", flush=True)
