"""Predictions are gathered under `if rank == 0`.

class: common-path
kind: hang
ranks: 3
expect: @diverged
rank: 0
line: required
"""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])


def save_predictions(model: torch.nn.Module, epoch: int) -> None:
    predictions = model(torch.randn(10, 6)).detach()
    everyone = [torch.empty_like(predictions) for _ in range(WORLD)]
    dist.gather(predictions, everyone, dst=0)  # FAULT
    print("epoch", epoch, "predictions", torch.cat(everyone).shape, flush=True)


def train_epoch(model: torch.nn.Module, opt: torch.optim.Optimizer) -> float:
    for _ in range(10):
        loss = model(torch.randn(10, 6)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    return loss.item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    net = DDP(torch.nn.Linear(6, 6))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for epoch in range(5):
        loss = train_epoch(net, optimizer)
        print(f"epoch {epoch} loss {loss:.5f}", flush=True)
        if RANK == 0:
            save_predictions(net.module, epoch)  # NEAR
