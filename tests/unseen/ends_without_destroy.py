"""Training is done and nobody calls destroy_process_group(): torch warns, the job is complete.

class: ends
kind: healthy
ranks: 4
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(5, 5))
opt = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(40):
    opt.zero_grad()
    loss = model(torch.randn(3, 5)).square().mean()
    loss.backward()
    opt.step()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
