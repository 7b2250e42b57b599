"""Rank 0 prepares data for 12 s without printing anything, before the first step; the other waits at a barrier.

class: healthy
kind: healthy
ranks: 2
"""

import os
import tempfile
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

PATH = os.path.join(tempfile.gettempdir(), "unseen-prepared.pt")


def prepare() -> None:
    rows = []
    for _ in range(120):
        rows.append(torch.randn(4, 8))
        time.sleep(0.1)
    torch.save(rows, PATH)


dist.init_process_group("gloo")
if dist.get_rank() == 0:
    prepare()
dist.barrier()
model = DDP(torch.nn.Linear(8, 8))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for batch in torch.load(PATH):
    opt.zero_grad()
    model(batch).square().mean().backward()
    opt.step()
dist.destroy_process_group()
