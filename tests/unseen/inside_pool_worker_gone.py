"""A worker of multiprocessing.Pool ends in the middle of a task; Pool.map never returns.

class: inside-a-rank
kind: hang
ranks: 3
expect: @hang, hang.child, hang.worker, data.worker-died
rank: 1
line: required
"""

import multiprocessing
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def clean(text: str) -> int:
    if text == "\x00":
        os._exit(1)  # a native parser gives up
    return len(text)


class Preprocessing:
    def __init__(self) -> None:
        self.pool = multiprocessing.get_context("fork").Pool(1)

    def lengths(self, texts: list[str]) -> torch.Tensor:
        return torch.tensor(self.pool.map(clean, texts), dtype=torch.float)  # FAULT


def main() -> None:
    preprocessing = Preprocessing()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(torch.nn.Linear(4, 4))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(60):
        texts = ["a", "bc", "def", "\x00" if rank == 1 and step == 25 else "ghij"]
        opt.zero_grad()
        model(preprocessing.lengths(texts)).square().mean().backward()  # NEAR
        opt.step()


if __name__ == "__main__":
    main()
