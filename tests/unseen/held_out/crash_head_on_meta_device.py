"""FSDP2 with a model built on the meta device: a head that is added later is never given memory, and its output can't be read.

class: framework-crashes
kind: crash
ranks: 2
expect: @raised
rank: any
line: required
must-mention: meta
"""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def build() -> nn.Sequential:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 16), nn.Linear(16, 40))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for layer in model:
        layer.reset_parameters()
    return model


def auxiliary_head(width: int) -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(width, width)


def auxiliary_loss(hidden: torch.Tensor, head: nn.Module) -> torch.Tensor:
    return (head(hidden) - hidden.detach()).square().mean()  # FAULT


def main() -> None:
    dist.init_process_group("gloo")
    model = build()
    head = auxiliary_head(16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(80):
        time.sleep(0.05)
        ids = torch.randint(0, 40, (2, 10))
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        if step >= 20:
            hidden = torch.randn(4, 16, requires_grad=True)
            loss = loss + 0.1 * auxiliary_loss(hidden, head)  # NEAR
        loss.backward()  # NEAR
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)  # NEAR
    dist.destroy_process_group()


main()
