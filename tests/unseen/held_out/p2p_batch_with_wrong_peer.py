"""Ring attention with batch_isend_irecv: after a re-ordering of the ring one rank receives from a rank that sends to another.

class: point-to-point
kind: hang
ranks: 4
expect: @diverged, @hang
rank: 2
line: required
"""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Ring:
    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.next, self.previous = (self.rank + 1) % self.size, (self.rank - 1) % self.size

    def rotate(self, block: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(block)
        operations = [dist.P2POp(dist.isend, block, self.next), dist.P2POp(dist.irecv, received, self.previous)]
        for request in dist.batch_isend_irecv(operations):
            request.wait()  # NEAR
        return received

    def use_topology(self, order: list[int]) -> None:
        position = order.index(self.rank)
        self.next = order[(position + 1) % self.size]
        self.previous = order[position - 1] if self.rank != 2 else order[position - 2]  # FAULT


def attention(query: torch.Tensor, block: torch.Tensor, ring: Ring) -> torch.Tensor:
    total = torch.zeros_like(query)
    for _ in range(ring.size):
        total = total + torch.softmax(query @ block.T, -1) @ block
        block = ring.rotate(block)  # NEAR
    return total


def main() -> None:
    dist.init_process_group("gloo")
    ring = Ring()
    model = DDP(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(100):
        time.sleep(0.1)
        if step == 15:
            ring.use_topology([0, 1, 2, 3])  # measured: the links are best in this order
        x = torch.randn(6, 8)
        loss = attention(model(x), x, ring).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if ring.rank == 0 and step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)


main()
