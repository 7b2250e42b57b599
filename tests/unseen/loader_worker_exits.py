"""A data-loader worker of the middle rank ends with os._exit(1) inside a decoder.

class: loader-workers
kind: crash
ranks: 3
expect: data.worker-died
rank: 1
line: none
"""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class Decoder:
    def __init__(self, strict: bool) -> None:
        self.strict, self.count = strict, 0

    def __call__(self, sample: torch.Tensor) -> torch.Tensor:
        self.count += 1
        if self.strict and self.count > 90:
            os._exit(1)
        return sample * 2 - 1


class Stream(IterableDataset):
    def __init__(self, rank: int) -> None:
        self.decode = Decoder(strict=rank == 1)

    def __iter__(self):
        for _ in range(300):
            yield self.decode(torch.rand(10))


dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(10, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for batch in DataLoader(Stream(dist.get_rank()), batch_size=4, num_workers=1):
    opt.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    opt.step()
