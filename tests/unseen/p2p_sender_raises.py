"""Rank 0 prepares data and sends it; its parser raises, the receivers lose their connection.

class: point-to-point
kind: crash
ranks: 3
expect: @raised
rank: 0
line: required
must-mention: ValueError
"""

import torch
import torch.distributed as dist

LINES = ["1 2 3 4"] * 30 + ["1 2 three 4"] + ["1 2 3 4"] * 30


def parse(line: str) -> torch.Tensor:
    return torch.tensor([float(word) for word in line.split()])  # FAULT


def feed() -> None:
    for line in LINES:
        row = parse(line)  # NEAR
        for peer in (1, 2):
            dist.send(row, dst=peer)


def learn() -> None:
    weight = torch.zeros(4)
    for _ in LINES:
        row = torch.empty(4)
        dist.recv(row, src=0)
        weight += 0.1 * (row - weight)


dist.init_process_group("gloo")
feed() if dist.get_rank() == 0 else learn()
dist.barrier()
