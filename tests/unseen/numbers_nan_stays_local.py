"""Three replicas with their own weights and a shared average of the metrics: only the one of rank 2 becomes NaN.

class: numbers
kind: numbers
outcome: any
ranks: 3
expect: @numbers
rank: 2
line: none
"""

import time

import torch
import torch.distributed as dist


def rate(rank: int) -> float:
    return [1e-3, 1e-2, 1e6][rank]


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.ReLU(), torch.nn.Linear(6, 1))
    opt = torch.optim.SGD(model.parameters(), lr=rate(rank))
    for step in range(200):
        x = torch.randn(16, 6)
        loss = (model(x).squeeze(-1) - x.sum(-1)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        done = torch.ones(1)
        dist.all_reduce(done)
        time.sleep(0.02)
        print(f"[{rank}] step {step} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


main()
