"""The optimizer is built before the model is converted to a copy: it updates parameters that nobody uses, the loss stays the same.

class: numbers
kind: numbers
ranks: 3
outcome: any
expect: @flat
rank: none, 0
line: none
"""

import copy
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def with_dropout_removed(model: nn.Module) -> nn.Module:
    """Returns a copy of the model for fine-tuning without dropout."""
    converted = copy.deepcopy(model)
    for module in converted.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return converted


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 48), nn.Dropout(0.1), nn.ReLU(), nn.Linear(48, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    trained = DDP(with_dropout_removed(model))
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(32, 12, generator=generator)  # a small data set: each step sees all of it
    y = torch.randint(0, 4, (32,), generator=generator)
    for step in range(300):
        time.sleep(0.02)
        loss = nn.functional.cross_entropy(trained(x), y)
        trained.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if rank == 0 and step % 3 == 0:
            rate = scheduler.get_last_lr()[0]
            print(f"step: {step} loss: {loss.item():.6f} lr: {rate:.2e}", flush=True)
    dist.destroy_process_group()


main()
