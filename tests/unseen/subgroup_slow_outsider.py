"""A subgroup exists, and the rank outside of it is slow in every step; the job finishes.

class: subgroups
kind: slow
ranks: 3
expect: @slow
rank: 2
line: required
"""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def augment(x: torch.Tensor, heavy: bool) -> torch.Tensor:
    if heavy:
        time.sleep(0.25)  # FAULT
    return x + 0.01 * torch.randn_like(x)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    model = DDP(torch.nn.Linear(32, 32))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(120):
        x = augment(torch.randn(8, 32), heavy=rank == 2)
        time.sleep(0.02)
        loss = model(x).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank < 2:
            dist.all_reduce(loss.detach(), group=pair)
    dist.destroy_process_group()


main()
