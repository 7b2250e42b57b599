"""Halo exchange with batch_isend_irecv: one rank leaves out its part to the left and goes on to the all-reduce.

class: point-to-point
kind: hang
ranks: 3
expect: @diverged
rank: 2
line: required
"""

import torch
import torch.distributed as dist
from torch.distributed import P2POp


def neighbours(rank: int, world: int, skip_left: bool) -> list[int]:
    peers = []
    if rank > 0 and not skip_left:
        peers.append(rank - 1)
    if rank < world - 1:
        peers.append(rank + 1)
    return peers


def exchange(field: torch.Tensor, peers: list[int]) -> None:
    if not peers:
        return  # FAULT
    halos = {peer: torch.empty(8) for peer in peers}
    ops = [P2POp(dist.isend, field, peer) for peer in peers] + [P2POp(dist.irecv, halos[peer], peer) for peer in peers]
    for request in dist.batch_isend_irecv(ops):
        request.wait()
    for halo in halos.values():
        field += 0.1 * halo


def residual(field: torch.Tensor) -> float:
    value = field.square().sum()
    dist.all_reduce(value)  # NEAR
    return value.item()


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
field = torch.randn(8)
for step in range(60):
    exchange(field, neighbours(rank, world, skip_left=rank == 2 and step == 22))  # NEAR
    field /= 1 + residual(field) ** 0.5  # NEAR
    if rank == 0 and step % 10 == 0:
        print("step", step, flush=True)
