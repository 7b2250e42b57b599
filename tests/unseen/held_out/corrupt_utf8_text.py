"""A text file in Latin-1 among UTF-8 files: UnicodeDecodeError on the rank that reads it.

class: corrupt-files
kind: crash
ranks: 3
expect: data.corrupt, @raised
rank: 1
line: required
"""

import os
import tempfile
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

FILES = 6


def write_corpus(folder: str) -> None:
    for number in range(FILES):
        text = "".join(f"Zeile {row}: Übung macht den Meister, auch früh\n" for row in range(20))
        with open(os.path.join(folder, f"part-{number:04d}.txt"), "wb") as file:
            file.write(text.encode("latin-1" if number == 4 else "utf-8"))


def lines(folder: str, rank: int, world_size: int) -> Iterator[str]:
    for name in sorted(os.listdir(folder))[rank::world_size]:
        with open(os.path.join(folder, name), encoding="utf-8") as file:
            yield from file  # FAULT


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    folder = tempfile.mkdtemp(prefix=f"corpus-{rank}-")
    write_corpus(folder)
    model = DDP(torch.nn.Sequential(torch.nn.Embedding(256, 8), torch.nn.Linear(8, 256)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, line in enumerate(lines(folder, rank, world_size)):  # NEAR
        time.sleep(0.05)
        ids = torch.tensor(list(line.encode()))
        loss = torch.nn.functional.cross_entropy(model(ids[:-1]), ids[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


main()
