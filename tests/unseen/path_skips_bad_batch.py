"""One rank skips a bad batch after the loss was reduced and before backward: the others wait for its gradients.

class: common-path
kind: hang
ranks: 4
expect: @diverged
rank: 2
line: required
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def global_loss(loss: torch.Tensor) -> float:
    t = loss.detach().clone()
    dist.all_reduce(t)  # NEAR
    return t.item() / dist.get_world_size()


def batches(rank: int):
    for i in range(100):
        x = torch.randn(4, 12)
        if rank == 2 and i == 9:
            x[0, 0] = float("inf")
        yield x


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(torch.nn.Linear(12, 12))
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    for i, x in enumerate(batches(rank)):
        loss = model(x).square().mean()
        mean = global_loss(loss.nan_to_num(posinf=0.0))  # NEAR
        if not torch.isfinite(loss):
            print(f"rank {rank}: skipping batch {i}", flush=True)
            continue  # FAULT
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0:
            print(f"iter {i}: loss {mean:.4f}", flush=True)


main()
