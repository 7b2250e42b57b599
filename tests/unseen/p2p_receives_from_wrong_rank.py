"""Stage 2 of a pipeline receives from stage 0 where it should receive from stage 1.

class: point-to-point
kind: hang
ranks: 3
expect: @diverged
rank: 2
line: required
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
layer = torch.nn.Linear(8, 8)


def receive(source: int) -> torch.Tensor:
    x = torch.empty(2, 8)
    dist.recv(x, src=source)  # FAULT
    return x


def previous(step: int) -> int:
    return rank - 1 if step < 25 or rank < 2 else 0  # a stage was replaced, and the table is wrong


with torch.no_grad():
    for step in range(50):
        x = torch.randn(2, 8) if rank == 0 else receive(previous(step))  # NEAR
        y = layer(x)
        if rank < world - 1:
            dist.send(y, dst=rank + 1)
        elif step % 10 == 0:
            print("step", step, "output", y.mean().item(), flush=True)
