"""Data-parallel pairs and one world all-reduce per step: one member of a pair is slow; the job finishes.

class: subgroups
kind: slow
ranks: 4
expect: @slow
rank: 1
line: none
"""

import time

import torch
import torch.distributed as dist


def compute(x: torch.Tensor, seconds: float) -> torch.Tensor:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)
    return x.square().mean()


dist.init_process_group("gloo")
rank = dist.get_rank()
pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
w = torch.nn.Linear(16, 16)
opt = torch.optim.SGD(w.parameters(), lr=0.01)
for step in range(110):
    loss = compute(w(torch.randn(4, 16)), 0.3 if rank == 1 else 0.05)
    opt.zero_grad()
    loss.backward()
    for p in w.parameters():
        dist.all_reduce(p.grad, group=pairs[rank // 2])
    opt.step()
    dist.all_reduce(loss.detach())
    if rank == 0 and step % 10 == 0:
        print("step", step, "loss", loss.item(), flush=True)
dist.destroy_process_group()
