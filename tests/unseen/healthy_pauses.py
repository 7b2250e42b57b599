"""All ranks pause for some seconds now and then (garbage collection of an object store, a slow file system).

class: healthy
kind: healthy
ranks: 4
"""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DDP(torch.nn.Linear(8, 8))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(90):
    opt.zero_grad()
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    opt.step()
    if step % 30 == 29:
        time.sleep(5 + rank * 0.5)
    if rank == 0 and step % 10 == 0:
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
dist.destroy_process_group()
