"""Tensor- and data-parallel groups: one rank reduces its gradients over the wrong one.

class: subgroups
kind: hang
ranks: 4
expect: @diverged
rank: 1
line: required
"""

import torch
import torch.distributed as dist


class Mesh:
    def __init__(self) -> None:
        rank = dist.get_rank()
        for members in ([0, 1], [2, 3]):
            group = dist.new_group(members)
            if rank in members:
                self.tp = group
        for members in ([0, 2], [1, 3]):
            group = dist.new_group(members)
            if rank in members:
                self.dp = group


def reduce_gradients(parameters, group) -> None:
    for p in parameters:
        dist.all_reduce(p.grad, group=group)  # FAULT
        p.grad /= 2


def train(mesh: Mesh) -> None:
    rank = dist.get_rank()
    model = torch.nn.Linear(16, 16, bias=False)
    opt = torch.optim.AdamW(model.parameters())
    for step in range(80):
        h = model(torch.randn(4, 16))
        dist.all_reduce(h.detach(), group=mesh.tp)
        opt.zero_grad()
        h.square().mean().backward()
        group = mesh.tp if rank == 1 and step == 21 else mesh.dp
        reduce_gradients(model.parameters(), group)  # NEAR
        opt.step()


dist.init_process_group("gloo")
train(Mesh())
dist.barrier()
