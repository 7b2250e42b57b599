"""A halo exchange on a periodic domain: each of four ranks waits for its left neighbour's edge before it sends its own one.

The first steps exchange nothing, as the edges are fixed. No rank differs from another.

class: point-to-point
kind: hang
ranks: 4
expect: @diverged, @hang, hang.together
decidable: no
rank: none
line: all
"""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

WARMUP = 12


class Halo:
    def __init__(self, width: int) -> None:
        self.rank, self.size, self.width = dist.get_rank(), dist.get_world_size(), width
        self.edge = torch.zeros(width)

    def refresh(self, field: torch.Tensor) -> torch.Tensor:
        left, right = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        request = dist.irecv(self.edge, src=left)
        request.wait()  # FAULT
        dist.send(field[-1].detach().contiguous(), dst=right)
        return self.edge


def main() -> None:
    dist.init_process_group("gloo")
    halo = Halo(10)
    model = DDP(nn.Sequential(nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    field = torch.randn(5, 10)
    for step in range(200):
        time.sleep(0.1)
        edge = halo.edge if step < WARMUP else halo.refresh(field)
        prediction = model(torch.cat([edge.unsqueeze(0), field]))
        loss = (prediction[1:] - field.roll(1, 0)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        field = torch.randn(5, 10) + 0.1 * prediction[1:].detach()
        if halo.rank == 0 and step % 3 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)


main()
