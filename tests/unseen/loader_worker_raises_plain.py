"""A transform raises a ValueError in a loader worker of the last rank.

class: loader-workers
kind: crash
ranks: 3
expect: @raised
rank: 2
line: required
must-mention: ValueError
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class Crop:
    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        if image.shape[-1] < self.size:
            raise ValueError(f"image of width {image.shape[-1]} is smaller than the crop of {self.size}")  # FAULT
        return image[..., : self.size]


class Folder(Dataset):
    def __init__(self, rank: int) -> None:
        self.rank, self.transform = rank, Crop(6)

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> torch.Tensor:
        width = 4 if self.rank == 2 and index == 130 else 8
        return self.transform(torch.randn(2, width))  # NEAR


dist.init_process_group("gloo")
model = DDP(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 1)))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for batch in DataLoader(Folder(dist.get_rank()), batch_size=4, num_workers=1):
    opt.zero_grad()
    model(batch).square().mean().backward()
    opt.step()
