"""A pipeline of three stages: at some step the middle one forgets to pass on its last micro-batch.

class: point-to-point
kind: hang
ranks: 3
expect: @diverged
rank: 1
line: required
"""

import torch
import torch.distributed as dist

MICRO_BATCHES = 4


class Stage:
    def __init__(self) -> None:
        self.rank, self.last = dist.get_rank(), dist.get_world_size() - 1
        self.layer = torch.nn.Linear(8, 8)
        self.opt = torch.optim.SGD(self.layer.parameters(), lr=0.01)

    def forward(self, count: int) -> list:
        kept = []
        for i in range(MICRO_BATCHES):
            x = torch.randn(4, 8)
            if self.rank > 0:
                dist.recv(x, src=self.rank - 1)
            x.requires_grad_()
            y = self.layer(x)
            if self.rank < self.last and i < count:
                dist.send(y.detach(), dst=self.rank + 1)
            kept.append((x, y))
        return kept

    def backward(self, kept: list) -> None:
        for x, y in kept:
            if self.rank == self.last:
                y.square().mean().backward()
            else:
                grad = torch.empty_like(y)
                dist.recv(grad, src=self.rank + 1)  # FAULT
                y.backward(grad)
            if self.rank > 0:
                dist.send(x.grad, dst=self.rank - 1)

    def step(self, index: int) -> None:
        self.opt.zero_grad()
        count = MICRO_BATCHES - 1 if self.rank == 1 and index == 14 else MICRO_BATCHES
        kept = self.forward(count)  # NEAR
        self.backward(kept)
        self.opt.step()


dist.init_process_group("gloo")
stage = Stage()
for index in range(40):
    stage.step(index)
dist.barrier()
