"""A gzip shard whose download was cut off: EOFError in a loader worker of rank 0.

class: corrupt-files
kind: crash
ranks: 2
expect: data.corrupt
rank: 0
line: required
must-mention: shard.txt.gz
"""

import gzip
import os
import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class Text(IterableDataset):
    def __init__(self, path: str) -> None:
        self.path = path

    def __iter__(self):
        with gzip.open(self.path, "rt") as file:
            for line in file:  # FAULT
                yield torch.tensor([float(word) for word in line.split()])


def write(path: str, cut: bool) -> None:
    with gzip.open(path, "wt") as file:
        for _ in range(400):
            file.write(" ".join(f"{x:.6f}" for x in torch.randn(5).tolist()) + "\n")
    if cut:
        os.truncate(path, os.path.getsize(path) // 2)


def main() -> None:
    dist.init_process_group("gloo")
    path = os.path.join(tempfile.mkdtemp(), "shard.txt.gz")
    write(path, cut=dist.get_rank() == 0)
    model = DDP(torch.nn.Linear(5, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in DataLoader(Text(path), batch_size=8, num_workers=1):
        opt.zero_grad()
        model(batch).square().mean().backward()
        opt.step()


main()
