"""The step time grows by a factor of 20 in the middle of the run: a curriculum goes on to longer sequences.

class: healthy
kind: healthy
ranks: 2
"""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(8, 8))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(140):
    long = step >= 120
    opt.zero_grad()
    loss = model(torch.randn(512 if long else 4, 8)).square().mean()
    time.sleep(1.0 if long else 0.05)
    loss.backward()
    opt.step()
    if dist.get_rank() == 0 and step % 20 == 0:
        print(f"{step=} {loss.item()=:.4f}", flush=True)
dist.destroy_process_group()
