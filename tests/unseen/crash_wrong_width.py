"""The feature vector of one rank is one wider than the model's input: shapes can't be multiplied, on the middle rank.

class: framework-crashes
kind: crash
ranks: 3
expect: @raised
rank: 1
line: required
must-mention: RuntimeError
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Encoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(12, 24)
        self.second = torch.nn.Linear(24, 1)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).relu()  # FAULT

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.hidden(x))  # NEAR


def features(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 13 if rank == 1 and step == 30 else 12)


dist.init_process_group("gloo")
model = DDP(Encoder())
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(60):
    opt.zero_grad()
    model(features(dist.get_rank(), step)).square().mean().backward()
    opt.step()
