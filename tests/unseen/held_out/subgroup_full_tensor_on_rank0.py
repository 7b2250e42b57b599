"""Tensor parallelism with DTensor: the norm of a weight is printed on rank 0 only, but full_tensor() is a collective of its mesh.

class: subgroups
kind: hang
ranks: 4
expect: @diverged
rank: 0
line: required
"""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class MLP(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def average_over(group: dist.ProcessGroup, model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad.to_local(), group=group)


def log_norm(step: int, model: MLP) -> None:
    norm = model.up.weight.full_tensor().norm()  # FAULT
    print(f"step {step} |up| {norm.item():.4f}", flush=True)


def main() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = parallelize_module(MLP(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + mesh["dp"].get_local_rank())
    for step in range(1, 150):
        time.sleep(0.1)
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        average_over(mesh.get_group("dp"), model)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
            if step % 15 == 0:
                log_norm(step, model)  # NEAR


main()
