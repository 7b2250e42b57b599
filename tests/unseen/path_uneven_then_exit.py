"""DDP where rank 0 has fewer batches and simply ends, without a last collective.

class: common-path
kind: hang
ranks: 3
expect: rank.early-exit, @diverged
rank: 0
line: none
"""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class Shard(Dataset):
    def __init__(self, rank: int) -> None:
        self.n = 180 if rank == 0 else 200

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.randn(14)


class Fit:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(14, 14))
        self.opt = torch.optim.AdamW(self.model.parameters())

    def step(self, batch: torch.Tensor) -> float:
        self.opt.zero_grad()
        loss = (self.model(batch) - batch).square().mean()
        loss.backward()
        self.opt.step()
        return loss.item()

    def run(self) -> None:
        for i, batch in enumerate(DataLoader(Shard(self.rank), batch_size=4)):
            loss = self.step(batch)
            if i % 10 == 0 and self.rank == 0:
                print(f"{i}: {loss:.4f}", flush=True)


dist.init_process_group("gloo")
Fit(dist.get_rank()).run()
