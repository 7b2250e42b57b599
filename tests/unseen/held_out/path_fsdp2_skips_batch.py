"""FSDP2: a rank skips a batch without any label, so its all-gathers are one batch ahead of those of the others.

class: common-path
kind: hang
ranks: 3
expect: @diverged
rank: 0
line: required
"""

import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


def batches(rank: int):
    generator = torch.Generator().manual_seed(rank)
    for index in range(300):
        ids = torch.randint(0, 64, (2, 12), generator=generator)
        labels = ids.clone()
        if rank == 0 and index == 22:
            labels[:] = -100  # the prompt alone fills the context
        yield ids, labels


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 24), Block(24), Block(24), nn.Linear(24, 64))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, (ids, labels) in enumerate(batches(rank), 1):
        time.sleep(0.05)
        if (labels != -100).sum() == 0:
            continue  # FAULT
        loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)  # NEAR
            if rank == 0:
                print(f"step {step} loss {mean.item() / dist.get_world_size():.4f}", flush=True)


main()
