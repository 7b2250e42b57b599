"""num_workers=0: the data set's __getitem__ waits in the rank itself; advice about loader workers would be wrong.

class: inside-a-rank
kind: hang
ranks: 2
expect: @hang
rank: 1
line: required
must-not-mention: DataLoader(timeout, loader worker, num_workers
"""

import threading

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.decoded = threading.Condition()

    def __len__(self) -> int:
        return 400

    def decode(self, index: int) -> torch.Tensor:
        with self.decoded:
            if self.rank == 1 and index == 100:
                self.decoded.wait()  # FAULT
        return torch.randn(3, 8, 8)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.decode(index)  # NEAR


dist.init_process_group("gloo")
model = DDP(torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 2)))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for images in DataLoader(Images(dist.get_rank()), batch_size=8):
    opt.zero_grad()
    model(images).square().mean().backward()
    opt.step()
