"""Rank 0 synchronizes its checkpoint with a command that does not end.

class: inside-a-rank
kind: hang
ranks: 2
expect: hang.child
rank: 0
line: required
"""

import subprocess

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def sync_checkpoint(step: int) -> None:
    subprocess.run(["sleep", "3600"], check=True)  # FAULT


class Loop:
    def __init__(self) -> None:
        self.model = DDP(torch.nn.Linear(8, 8))
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def run(self, steps: int) -> None:
        for step in range(1, steps):
            self.opt.zero_grad()
            self.model(torch.randn(4, 8)).square().mean().backward()
            self.opt.step()
            if step % 25 == 0 and dist.get_rank() == 0:
                sync_checkpoint(step)  # NEAR


dist.init_process_group("gloo")
Loop().run(100)
