"""One rank's limit of open files is low, and its data set keeps a file open per shard.

class: environment
kind: crash
ranks: 2
expect: data.too-many-files
rank: 1
line: required
"""

import resource
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Shards:
    def __init__(self) -> None:
        self.folder, self.files = Path(tempfile.mkdtemp()), []

    def open(self, number: int):
        file = self.folder.joinpath(f"shard-{number:05d}.bin").open("w+b")  # FAULT
        self.files.append(file)
        return file

    def read(self, number: int) -> torch.Tensor:
        self.open(number).write(b"\0" * 16)  # NEAR
        return torch.randn(4, 8)


dist.init_process_group("gloo")
if dist.get_rank() == 1:
    resource.setrlimit(resource.RLIMIT_NOFILE, (90, 90))
shards = Shards()
model = DDP(torch.nn.Linear(8, 8))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(200):
    opt.zero_grad()
    model(shards.read(step)).square().mean().backward()
    opt.step()
