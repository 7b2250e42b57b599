"""Rank 0 starts helper programs: one is waited for, one runs beside the training and is ended.

class: healthy
kind: healthy
ranks: 2
"""

import subprocess
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
monitor = subprocess.Popen(["sleep", "600"]) if rank == 0 else None
model = DDP(torch.nn.Linear(8, 8))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(120):
    opt.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    opt.step()
    if rank == 0 and step % 50 == 49:
        out = subprocess.run(
            [sys.executable, "-c", "import time; time.sleep(3); print('score', 1)"],
            capture_output=True,
            text=True,
            check=True,
        )
        print(step, out.stdout.strip(), flush=True)
if monitor is not None:
    monitor.terminate()
    monitor.wait()
dist.destroy_process_group()
