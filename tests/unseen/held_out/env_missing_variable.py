"""The script reads a folder from an environment variable that the job script did not export: KeyError on all ranks.

class: environment
kind: crash
ranks: 2
expect: env.*, launch.*, @raised
rank: any
line: required
must-mention: CORPUS_ROOT
"""

import os
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


@dataclass
class Config:
    width: int = 16
    steps: int = 60
    corpus: str = field(default_factory=lambda: os.environ["CORPUS_ROOT"])  # FAULT
    learning_rate: float = float(os.environ.get("LEARNING_RATE", "0.01"))


def read_rows(config: Config, rank: int) -> torch.Tensor:
    path = os.path.join(config.corpus, f"shard-{rank:05d}.pt")
    return torch.load(path) if os.path.exists(path) else torch.randn(480, config.width)


def main() -> None:
    config = Config()  # NEAR
    dist.init_process_group("gloo")
    rows = read_rows(config, dist.get_rank())
    model = DDP(torch.nn.Linear(config.width, config.width))
    optimizer = torch.optim.SGD(model.parameters(), lr=config.learning_rate)
    for step in range(config.steps):
        time.sleep(0.05)
        batch = rows[step * 8 % 480 :][:8]
        loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


main()
