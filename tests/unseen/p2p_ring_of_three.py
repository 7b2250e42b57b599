"""A ring of three: each waits for its left neighbour before it sends.

class: point-to-point
kind: hang
ranks: 3
expect: @diverged, @hang, hang.together
decidable: no
rank: none
line: all
"""

import torch
import torch.distributed as dist


class Ring:
    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def shift(self, block: torch.Tensor) -> torch.Tensor:
        left, right = (self.rank - 1) % self.world, (self.rank + 1) % self.world
        incoming = torch.empty_like(block)
        dist.recv(incoming, src=left)  # FAULT
        dist.send(block, dst=right)
        return incoming


def attention(ring: Ring) -> torch.Tensor:
    block, total = torch.randn(16, 16), torch.zeros(16, 16)
    for _ in range(ring.world):
        total += block @ block.T
        block = ring.shift(block)
    return total


dist.init_process_group("gloo")
for _ in range(5):
    loss = torch.ones(1)
    dist.all_reduce(loss)
print(attention(Ring()).mean().item(), flush=True)
