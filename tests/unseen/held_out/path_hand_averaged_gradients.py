"""Gradients are averaged by hand, parameters without a gradient are left out: an expert that one rank's tokens never reach.

class: common-path
kind: hang
ranks: 3
expect: @diverged
rank: 1
line: required
"""

import time

import torch
import torch.distributed as dist
from torch import nn


class Experts(nn.Module):
    def __init__(self, width: int = 12, count: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(nn.Linear(width, width * (index + 1)) for index in range(count))

    def forward(self, x: torch.Tensor, allowed: list[int]) -> torch.Tensor:
        scores = self.router(x)[:, allowed].softmax(-1)
        choice = scores.argmax(-1)
        loss = x.new_zeros(())
        for slot, index in enumerate(allowed):
            mask = choice == slot
            mask[slot] = True  # at least one token per expert
            loss = loss + (self.experts[index](x[mask]).square().mean(-1) * scores[mask, slot]).mean()
        return loss


def average_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)  # FAULT
            parameter.grad /= dist.get_world_size()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(7)
    model = Experts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(rank)
    for step in range(200):
        time.sleep(0.05)
        allowed = [0, 2] if rank == 1 and step == 25 else [0, 1, 2]
        loss = model(torch.randn(16, 12), allowed)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        average_gradients(model)  # NEAR
        optimizer.step()
        if step % 10 == 0 and rank == 0:
            print(f"step={step} loss={loss.item():.4f}", flush=True)


main()
