"""A data-loader worker gets SIGKILL at its eighth batch (here it sends it to itself).

class: loader-workers
kind: crash
ranks: 2
expect: data.worker-died
rank: 0
line: none
"""

import os
import signal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class Corpus(Dataset):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.rank == 0 and index == 64:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.randn(16)


def main() -> None:
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(16, 16))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in DataLoader(Corpus(dist.get_rank()), batch_size=8, num_workers=1):
        opt.zero_grad()
        model(batch).square().mean().backward()
        opt.step()


if __name__ == "__main__":
    main()
