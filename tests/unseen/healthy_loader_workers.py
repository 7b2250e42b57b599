"""Two loader workers per rank, persistent, and a first batch that takes a while.

class: healthy
kind: healthy
ranks: 2
"""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Rows(Dataset):
    opened = False

    def __len__(self) -> int:
        return 640

    def __getitem__(self, index: int) -> torch.Tensor:
        if not Rows.opened:
            time.sleep(3)
            Rows.opened = True
        return torch.full((6,), float(index))


def main() -> None:
    dist.init_process_group("gloo")
    rows = Rows()
    sampler = DistributedSampler(rows)
    loader = DataLoader(rows, batch_size=8, sampler=sampler, num_workers=2, persistent_workers=True)
    model = DDP(torch.nn.Linear(6, 1))
    opt = torch.optim.SGD(model.parameters(), lr=1e-7)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for batch in loader:
            opt.zero_grad()
            model(batch).square().mean().backward()
            opt.step()
    dist.destroy_process_group()


main()
