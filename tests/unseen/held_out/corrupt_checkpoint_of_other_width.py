"""The best checkpoint is loaded again at the end, but another run with a wider model has written to the same file.

class: corrupt-files
kind: crash
ranks: 2
expect: data.corrupt, @raised, ckpt.*, checkpoint.*
rank: any
line: required
must-mention: size mismatch
"""

import os
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def build(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 1))


def load_best(model: nn.Module, path: str) -> None:
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])  # FAULT


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    path = os.path.join(tempfile.mkdtemp(), "best.pt")
    model = DDP(build(32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    best = float("inf")
    for step in range(60):
        time.sleep(0.05)
        x = torch.randn(16, 6)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < best and step % 5 == 0:
            best = loss.item()
            torch.save({"model": model.module.state_dict(), "step": step}, path)
        if rank == 0 and step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    torch.save({"model": build(64).state_dict(), "step": 0}, path)  # the other run
    dist.barrier()
    load_best(model.module, path)  # NEAR
    dist.destroy_process_group()


main()
