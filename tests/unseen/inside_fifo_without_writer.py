"""Commands are read from a named pipe that nobody opens for writing.

class: inside-a-rank
kind: hang
ranks: 2
expect: @hang
rank: 0
line: required
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
path = os.path.join(tempfile.mkdtemp(), "commands.fifo")
os.mkfifo(path)
model = DDP(torch.nn.Linear(8, 8))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(60):
    opt.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    opt.step()
    if rank == 0 and step == 30:
        with open(path) as commands:  # FAULT
            print("commands:", commands.read(), flush=True)
