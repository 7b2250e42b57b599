"""A tqdm bar, and an evaluation of 8 s on rank 0 while the others wait at a barrier.

class: healthy
kind: healthy
ranks: 3
"""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from tqdm import tqdm


@torch.no_grad()
def evaluate(model: torch.nn.Module) -> float:
    total = 0.0
    for _ in tqdm(range(40), desc="evaluating"):
        time.sleep(0.2)
        total += model(torch.randn(16, 8)).square().mean().item()
    return total / 40


dist.init_process_group("gloo")
rank = dist.get_rank()
model = DDP(torch.nn.Linear(8, 8))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(2):
    bar = tqdm(range(60), disable=rank != 0)
    for _ in bar:
        opt.zero_grad()
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        opt.step()
        bar.set_postfix(loss=loss.item())
    if rank == 0:
        print(f"epoch {epoch}: {evaluate(model.module):.4f}", flush=True)
    dist.barrier()
dist.destroy_process_group()
