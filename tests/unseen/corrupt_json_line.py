"""A line of a JSONL file is cut off in the middle; the file's name is not in Python's message.

class: corrupt-files
kind: crash
ranks: 2
expect: data.corrupt, @raised
rank: 1
line: required
must-mention: part-0003.jsonl
"""

import json
import os
import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

FOLDER = tempfile.mkdtemp()


def write(rank: int) -> None:
    for part in range(6):
        with open(os.path.join(FOLDER, f"part-{part:04d}.jsonl"), "w") as file:
            for i in range(8):
                line = json.dumps({"values": [i, part, 1.0, 0.5]})
                file.write((line[:14] if rank == 1 and part == 3 and i == 5 else line) + "\n")


def rows():
    for name in sorted(os.listdir(FOLDER)):
        with open(os.path.join(FOLDER, name)) as file:
            for line in file:
                yield torch.tensor(json.loads(line)["values"])  # FAULT


def main() -> None:
    dist.init_process_group("gloo")
    write(dist.get_rank())
    model = DDP(torch.nn.Linear(4, 4))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for row in rows():  # NEAR
        opt.zero_grad()
        model(row).square().mean().backward()
        opt.step()


main()
