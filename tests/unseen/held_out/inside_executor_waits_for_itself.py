"""A prefetching thread pool of size 1: a task that finds its file missing in the cache submits another task and waits for it.

class: inside-a-rank
kind: hang
ranks: 3
expect: @hang
rank: 1
line: required
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Prefetcher:
    def __init__(self, rank: int) -> None:
        self.pool = ThreadPoolExecutor(max_workers=1)
        self.rank = rank
        self.cached = set(range(400)) - ({35} if rank == 1 else set())
        self.pending: Future[torch.Tensor] = self.pool.submit(self.load, 0)

    def download(self, index: int) -> None:
        time.sleep(0.2)
        self.cached.add(index)

    def load(self, index: int) -> torch.Tensor:
        if index not in self.cached:
            self.pool.submit(self.download, index).result()  # FAULT
        return torch.randn(8, 7, generator=torch.Generator().manual_seed(index))

    def next(self, index: int) -> torch.Tensor:
        batch = self.pending.result()  # NEAR
        self.pending = self.pool.submit(self.load, index + 1)
        return batch


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    prefetcher = Prefetcher(rank)
    model = DDP(torch.nn.Linear(7, 7))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(300):
        batch = prefetcher.next(step)  # NEAR
        time.sleep(0.05)
        loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 10 == 0:
            print(f"iter {step}: loss {loss.item():.4f}", flush=True)


main()
