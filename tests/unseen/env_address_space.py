"""RLIMIT_AS is set on rank 0, and its replay buffer needs more than that.

class: environment
kind: crash
ranks: 2
expect: oom.host-allocation
rank: 0
line: required
"""

import resource

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def used() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def replay_buffer(rows: int) -> torch.Tensor:
    return torch.empty(rows, 1024, 1024)  # FAULT


def main() -> None:
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(8, 8))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(60):
        opt.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        opt.step()
        if step == 30 and dist.get_rank() == 0:
            resource.setrlimit(resource.RLIMIT_AS, (used() + 256 * 2**20,) * 2)
            replay_buffer(1000)  # NEAR


main()
