"""A file token.py beside the script hides the module of the standard library: torch can't be imported.

class: environment
kind: crash
ranks: 2
expect: env.*, launch.*, @raised
rank: any
line: none
must-mention: token.py
"""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from token import SpecialTokens  # isort: skip


def main() -> None:
    dist.init_process_group("gloo")
    tokens = SpecialTokens()
    model = DDP(torch.nn.Sequential(torch.nn.Embedding(tokens.count, 8), torch.nn.Linear(8, tokens.count)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(60):
        time.sleep(0.05)
        ids = torch.randint(0, tokens.count, (4, 12))
        ids[:, 0] = tokens.begin
        loss = torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


main()
