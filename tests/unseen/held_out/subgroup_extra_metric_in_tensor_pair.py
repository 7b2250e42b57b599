"""A 2x2 mesh with hand-written tensor parallelism: one rank sums a metric over its tensor-parallel pair, its partner does not.

class: subgroups
kind: hang
ranks: 4
expect: @diverged
rank: 3
line: required
"""

import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


class RowParallel(torch.autograd.Function):
    """Sums the partial outputs of a pair; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return gradient, None


def report_outliers(activations: torch.Tensor, group: dist.ProcessGroup) -> None:
    largest = activations.detach().abs().amax(0)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)  # FAULT
    print(f"large activations: {largest.max().item():.2f}", flush=True)


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "tensor"))
    tensor, replica = mesh.get_group("tensor"), mesh.get_group("replica")
    rank = dist.get_rank()
    torch.manual_seed(mesh["tensor"].get_local_rank())
    up, down = torch.nn.Linear(10, 20, bias=False), torch.nn.Linear(20, 10, bias=False)
    optimizer = torch.optim.SGD([*up.parameters(), *down.parameters()], lr=1e-3)
    torch.manual_seed(mesh["replica"].get_local_rank())
    for step in range(200):
        time.sleep(0.1)
        x = torch.randn(6, 10)
        hidden = torch.relu(up(x))
        if rank == 3 and step == 18:
            hidden = hidden * 40  # a bad row of this rank's slice
        if hidden.max() > 25:
            report_outliers(hidden, tensor)  # NEAR
        loss = RowParallel.apply(down(hidden), tensor).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for layer in (up, down):
            dist.all_reduce(layer.weight.grad, group=replica)
        optimizer.step()
        if rank == 0 and step % 4 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)


main()
