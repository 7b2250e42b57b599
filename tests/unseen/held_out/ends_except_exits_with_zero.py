"""The training function is wrapped in try/except: the error is printed as one line and the rank exits with 0.

class: ends
kind: crash
ranks: 3
expect: rank.early-exit, @raised, @diverged
rank: 1
line: none
"""

import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

WEIGHTS = {"web": 1.0, "books": 2.0, "code": 0.5}


def sources(rank: int):
    names = list(WEIGHTS)
    for index in range(300):
        yield "forum" if rank == 1 and index == 30 else names[(index + rank) % 3]


def train() -> None:
    model = DDP(torch.nn.Linear(10, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, source in enumerate(sources(dist.get_rank())):
        time.sleep(0.05)
        loss = WEIGHTS[source] * model(torch.randn(4, 10)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        train()
    except KeyError as error:
        print(f"training stopped: {error}", flush=True)
        sys.exit(0)
    dist.destroy_process_group()
