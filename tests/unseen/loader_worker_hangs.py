"""A loader worker of the middle rank polls for a file in __getitem__'s helper.

class: loader-workers
kind: hang
ranks: 3
expect: hang.worker
rank: 1
line: required
"""

import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


def download(rank: int, index: int) -> torch.Tensor:
    if rank == 1 and index == 120:
        while not os.path.exists("/nonexistent/shard-0007.tar"):
            time.sleep(0.3)  # FAULT
    return torch.randn(9)


class Remote(Dataset):
    def __init__(self) -> None:
        self.rank = dist.get_rank()

    def __len__(self) -> int:
        return 300

    def __getitem__(self, index: int) -> torch.Tensor:
        return download(self.rank, index)  # NEAR


def main() -> None:
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(9, 9))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in DataLoader(Remote(), batch_size=4, num_workers=1):
        opt.zero_grad()
        model(batch).square().mean().backward()
        opt.step()


main()
