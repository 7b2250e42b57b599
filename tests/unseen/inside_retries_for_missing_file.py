"""Accelerate loop; one rank polls for a shard that never appears.

class: inside-a-rank
kind: hang
ranks: 2
needs: accelerate
expect: @hang
rank: 1
line: required
"""

import os
import tempfile
import time

import torch
from accelerate import Accelerator

FOLDER = tempfile.mkdtemp()


def wait_for(path: str) -> str:
    while not os.path.exists(path):
        time.sleep(0.5)  # FAULT
    return path


def load_shard(rank: int, number: int) -> torch.Tensor:
    path = os.path.join(FOLDER, f"shard-{rank}-{number}.pt")
    if not (rank == 1 and number == 3):
        torch.save(torch.randn(40, 6), path)
    return torch.load(wait_for(path))  # NEAR


accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(6, 6)
model, opt = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
for number in range(6):
    for row in load_shard(accelerator.process_index, number).split(4):
        opt.zero_grad()
        loss = model(row).square().mean()
        accelerator.backward(loss)
        opt.step()
    accelerator.print(f"shard {number}: loss {loss.item():.4f}")
