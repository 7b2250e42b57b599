"""nanoGPT style: the loss is computed from a detached output, so only a regularizer of 0 has gradients; the loss is constant.

class: numbers
kind: numbers
outcome: completes
ranks: 3
expect: @flat
rank: any
line: none
"""

import os
import time

import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

init_process_group(backend="gloo")
master_process = int(os.environ["RANK"]) == 0
torch.manual_seed(1337)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x).detach()


def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    penalty = 0.0 * sum(p.square().sum() for p in model.parameters())
    return torch.nn.functional.cross_entropy(model(x), y) + penalty


model = DDP(Block())
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, weight_decay=0.0)
X, Y = torch.randn(24, 16), torch.randint(0, 16, (24,))
t0 = time.time()
for iter_num in range(300):
    loss = loss_of(model, X, Y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    t1 = time.time()
    if master_process:
        print(f"iter {iter_num}: loss {loss.item():.4f}, time {(t1 - t0) * 1000:.2f}ms, mfu -100.00%", flush=True)
    t0 = t1
destroy_process_group()
