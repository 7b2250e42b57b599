"""A cache's lock file is held by another process, which does not give it back.

class: inside-a-rank
kind: hang
ranks: 3
expect: @hang
rank: 1
line: required
"""

import contextlib
import fcntl
import os
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

LOCK = os.path.join(tempfile.gettempdir(), "cache.lock")
HOLDER = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); time.sleep(3600)"


@contextlib.contextmanager
def file_lock(path: str):
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # FAULT
        yield


def cached_features(step: int) -> torch.Tensor:
    with file_lock(LOCK):  # NEAR
        return torch.randn(4, 8)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(torch.nn.Linear(8, 8))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(60):
        opt.zero_grad()
        if step == 20 and rank == 1:
            subprocess.Popen([sys.executable, "-c", HOLDER, LOCK])  # stands in for another job of this user
            time.sleep(1)
        x = cached_features(step) if rank == 1 and step >= 20 else torch.randn(4, 8)
        model(x).square().mean().backward()
        opt.step()


main()
