"""An atexit handler of rank 1 waits at a barrier; the other ranks have no such handler and end.

class: ends
kind: hang
ranks: 3
expect: @diverged, @hang
rank: 1
line: required
"""

import atexit

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def last_sync() -> None:
    dist.barrier()  # FAULT
    print("all ranks are done", flush=True)


def main() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        atexit.register(last_sync)
    model = DDP(torch.nn.Linear(5, 5))
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(40):
        opt.zero_grad()
        model(torch.randn(3, 5)).square().mean().backward()
        opt.step()


main()
