"""sys.exit(3) deep in a helper, on the last rank.

class: ends
kind: crash
ranks: 3
expect: rank.exit, @raised
rank: 2
line: required
"""

import sys

import torch
import torch.distributed as dist


def fail(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
    sys.exit(3)  # FAULT


def check_gradients(model: torch.nn.Module, step: int) -> None:
    norm = sum(p.grad.norm() ** 2 for p in model.parameters()) ** 0.5
    if dist.get_rank() == 2 and step == 20:
        norm = norm * 1e6
    if norm > 1e4:
        fail(f"gradient norm {norm:.1f} is above the limit")


dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(6, 6))
opt = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(100):
    opt.zero_grad()
    model(torch.randn(3, 6)).square().mean().backward()
    check_gradients(model, step)
    opt.step()
