"""A model in pure float16 with Adam: eps = 1e-8 is zero in float16, a gradient that underflows gives 0 / 0, and all is NaN.

class: numbers
kind: numbers
ranks: 2
outcome: any
expect: @numbers
rank: none, 0
line: none
"""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

VOCABULARY = 40


class Bigrams(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(Bigrams().half())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)
    for step in range(160):
        time.sleep(0.03)
        if step == 48:  # second phase of the recipe
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        start = torch.randint(0, VOCABULARY // 2, (8, 1))  # half of the vocabulary never occurs: its gradients are 0
        ids = (start + torch.arange(10)) % (VOCABULARY // 2)
        logits = model(ids[:, :-1]).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 4 == 0:
            print(f"step {step:3d} | train loss {loss.item():.4f} | lr {optimizer.param_groups[0]['lr']}", flush=True)
    dist.destroy_process_group()


main()
