"""An augmentation adds noise in place to an activation that the backward pass needs; only one rank's recipe has the augmentation.

class: framework-crashes
kind: crash
ranks: 4
expect: @raised
rank: 2
line: required
must-mention: inplace
"""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 20), nn.Linear(20, 10)
        self.noise = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.sigmoid(self.first(x))
        output = self.second(hidden)
        if self.noise:
            hidden += self.noise * torch.randn_like(hidden)  # NEAR
        return output + hidden.mean()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    encoder = Encoder()
    model = DDP(encoder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(80):
        time.sleep(0.05)
        if step == 24 and rank == 2:
            encoder.noise = 0.1
        x = torch.randn(6, 10)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()  # FAULT
        optimizer.step()
        if step % 10 == 0 and rank == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


main()
