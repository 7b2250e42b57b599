"""A tokenizer call in a thread pool waits for an event that nobody sets; the loop waits for its future.

class: inside-a-rank
kind: hang
ranks: 3
expect: @hang
rank: 0
line: required
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

VOCABULARY_READY = threading.Event()


def tokenize(step: int, rank: int) -> torch.Tensor:
    if rank != 0 or step < 30:
        return torch.randint(0, 16, (4, 6))
    VOCABULARY_READY.wait()  # NEAR
    return torch.randint(0, 32, (4, 6))


dist.init_process_group("gloo")
rank = dist.get_rank()
model = DDP(torch.nn.Sequential(torch.nn.Embedding(32, 8), torch.nn.Linear(8, 8)))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
with ThreadPoolExecutor(1) as pool:
    future = pool.submit(tokenize, 0, rank)
    for step in range(1, 80):
        batch = future.result()  # FAULT
        future = pool.submit(tokenize, step, rank)
        opt.zero_grad()
        model(batch).square().mean().backward()
        opt.step()
