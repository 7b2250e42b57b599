"""Two pipelines of two stages: the last stage of one of them sends no gradient back for a micro-batch without targets.

The two stages of that pipeline then wait for each other, so that either may be the one that is out of step.

class: subgroups
kind: hang
ranks: 4
expect: @diverged, @hang, hang.together
rank: 3, none
line: required
"""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

MICRO_BATCHES, WIDTH = 3, 14


def average(stage: nn.Module, group: dist.ProcessGroup) -> None:
    for parameter in stage.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad, group=group)


def first_stage(stage: nn.Module, peer: int) -> None:
    for _ in range(MICRO_BATCHES):
        output = stage(torch.randn(4, WIDTH))
        dist.send(output.detach(), peer)
        gradient = torch.empty(4, WIDTH)
        dist.recv(gradient, peer)  # NEAR
        output.backward(gradient)


def last_stage(stage: nn.Module, peer: int, targets: list[int]) -> float:
    total = 0.0
    for micro_batch in range(MICRO_BATCHES):
        received = torch.empty(4, WIDTH)
        dist.recv(received, peer)  # NEAR
        if targets[micro_batch] == 0:
            continue  # FAULT
        received.requires_grad_()
        loss = stage(received).square().mean()
        loss.backward()
        dist.send(received.grad, peer)
        total += loss.item()
    return total


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "replica"))  # stages: ranks 0, 1 and ranks 2, 3
    rank = dist.get_rank()
    stage = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.01)
    for step in range(150):
        time.sleep(0.1)
        if rank < 2:
            first_stage(stage, rank + 2)
        else:
            targets = [4, 0, 4] if rank == 3 and step == 20 else [4, 4, 4]
            loss = last_stage(stage, rank - 2, targets)
            if rank == 2 and step % 5 == 0:
                print(f"step {step} loss {loss:.4f}", flush=True)
        average(stage, mesh.get_group("replica"))
        optimizer.step()
        optimizer.zero_grad()


main()
