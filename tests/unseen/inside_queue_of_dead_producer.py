"""A prefetch thread dies of a KeyError; the training loop waits for its next batch.

class: inside-a-rank
kind: hang
ranks: 2
expect: @hang
rank: 1
line: required
must-mention: KeyError
"""

import queue
import threading

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Prefetcher:
    def __init__(self, samples: dict[int, torch.Tensor], order: list[int]) -> None:
        self.samples, self.order = samples, order
        self.queue: queue.Queue = queue.Queue(maxsize=4)
        threading.Thread(target=self.produce, daemon=True, name="prefetch").start()

    def produce(self) -> None:
        for index in self.order:
            self.queue.put(self.samples[index])  # NEAR

    def next(self) -> torch.Tensor:
        return self.queue.get()  # FAULT


def main() -> None:
    dist.init_process_group("gloo")
    samples = {i: torch.randn(4, 8) for i in range(60)}
    if dist.get_rank() == 1:
        del samples[33]
    prefetcher = Prefetcher(samples, list(range(60)))
    model = DDP(torch.nn.Linear(8, 8))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(60):
        opt.zero_grad()
        model(prefetcher.next()).square().mean().backward()  # NEAR
        opt.step()


main()
