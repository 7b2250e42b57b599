"""Sequence packing: documents are drawn until one fits into the room that is left; on the last rank none ever does.

class: inside-a-rank
kind: hang
ranks: 4
expect: @hang
rank: 3
line: required
"""

import random
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

BLOCK = 64


class Packer:
    def __init__(self, rank: int) -> None:
        self.random = random.Random(rank)
        self.lengths = [4, 7, 12, 20, 31]

    def fitting(self, room: int) -> int:
        length = self.random.choice(self.lengths)
        while length > room:  # FAULT
            length = self.random.choice(self.lengths)  # NEAR
        return length

    def pack(self) -> torch.Tensor:
        tokens: list[int] = []
        while BLOCK - len(tokens) >= 4:
            tokens += [self.random.randrange(40) for _ in range(self.fitting(BLOCK - len(tokens)))]  # NEAR
        return torch.tensor(tokens + [0] * (BLOCK - len(tokens)))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    packer = Packer(rank)
    model = DDP(torch.nn.Sequential(torch.nn.Embedding(40, 12), torch.nn.Linear(12, 40)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(300):
        if rank == 3 and step == 30:
            packer.lengths = [41, 55]  # the next source has long documents only
        ids = packer.pack()  # NEAR
        time.sleep(0.05)
        loss = torch.nn.functional.cross_entropy(model(ids[:-1]), ids[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step} | loss {loss.item():.4f}", flush=True)


main()
