"""A reader ends the process with 0 when its shard is empty.

class: ends
kind: crash
ranks: 3
expect: rank.early-exit
rank: 1
line: required
"""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class ShardReader:
    def __init__(self, shards: int) -> None:
        self.left = shards

    def read(self) -> torch.Tensor:
        if self.left == 0:
            print("all shards are read", flush=True)
            sys.exit()  # FAULT
        self.left -= 1
        return torch.randn(8, 10)


dist.init_process_group("gloo")
reader = ShardReader(30 if dist.get_rank() == 1 else 50)
model = DDP(torch.nn.Linear(10, 10))
opt = torch.optim.Adam(model.parameters())
for _ in range(50):
    opt.zero_grad()
    model(reader.read()).square().mean().backward()
    opt.step()
dist.destroy_process_group()
