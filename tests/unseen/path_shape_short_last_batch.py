"""Losses per sample are all-reduced; the last batch of one rank's epoch is shorter.

class: common-path
kind: hang
ranks: 4
expect: @diverged
rank: 3
line: required
"""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset


class Trainer:
    def __init__(self) -> None:
        self.rank = dist.get_rank()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(10, 1)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.05)
        size = 397 if self.rank == 3 else 400
        self.loader = DataLoader(TensorDataset(torch.randn(size, 10), torch.randn(size, 1)), batch_size=20)

    def sample_losses(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        losses = (self.net(x) - y).square().flatten()
        mean = losses.detach().clone()
        dist.all_reduce(mean)  # FAULT
        return losses

    def fit(self) -> None:
        for epoch in range(3):
            for x, y in self.loader:
                loss = self.sample_losses(x, y).mean()
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
            if self.rank == 0:
                print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)


dist.init_process_group("gloo")
Trainer().fit()
dist.destroy_process_group()
