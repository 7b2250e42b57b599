"""DDP: an auxiliary head is skipped on one rank, so its gradients never come; DDP says so on that rank at its next forward.

class: common-path
kind: crash
ranks: 3
expect: @raised, @diverged
rank: 2
line: required
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 1)
        self.aux = torch.nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, has_aux: bool) -> torch.Tensor:
        h = self.trunk(x).relu()
        out = self.head(h)
        if has_aux:
            out = out + self.aux(h)  # NEAR
        return out


dist.init_process_group("gloo")
rank = dist.get_rank()
model = DDP(Net())
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(50):
    x = torch.randn(4, 8)
    loss = model(x, has_aux=not (rank == 2 and step == 15)).square().mean()  # FAULT
    opt.zero_grad()
    loss.backward()
    opt.step()
dist.destroy_process_group()
