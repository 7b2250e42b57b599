"""DDP loop whose metrics helper reduces the loss only where the loss is high: a collective that one rank makes alone.

class: common-path
kind: hang
ranks: 3
expect: @diverged
rank: 1
line: required
"""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def average(value: float) -> float:
    t = torch.tensor([value])
    dist.all_reduce(t)  # FAULT
    return t.item() / dist.get_world_size()


def maybe_report(step: int, loss: float) -> None:
    if loss > 50:
        print(f"step {step}: unusually high loss {average(loss):.3f}", flush=True)  # NEAR


def main() -> None:
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    model = DDP(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(200):
        x = torch.randn(8, 16)
        target = torch.full((8, 1), 30.0 if rank == 1 and step == 12 else 0.5)
        loss = (model(x) - target).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        maybe_report(step, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
