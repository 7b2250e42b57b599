"""A background thread of the last rank aborts the process while the others train.

class: ends
kind: crash
ranks: 3
expect: rank.crash, rank.signal
rank: 2
line: required
"""

import os
import threading
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Watchdog(threading.Thread):
    def __init__(self, patience: float) -> None:
        super().__init__(daemon=True)
        self.patience, self.fed = patience, time.monotonic()

    def run(self) -> None:
        while True:
            time.sleep(0.1)
            if time.monotonic() - self.fed > self.patience:
                os.abort()  # FAULT


dist.init_process_group("gloo")
if dist.get_rank() == 2:
    Watchdog(1.5).start()  # nobody feeds it
model = DDP(torch.nn.Linear(5, 5))
opt = torch.optim.SGD(model.parameters(), lr=0.05)
for _ in range(200):
    opt.zero_grad()
    model(torch.randn(3, 5)).square().mean().backward()
    opt.step()
    time.sleep(0.02)
dist.destroy_process_group()
