"""A meter that is synced as float64 on the rank whose sum came from numpy.

class: common-path
kind: hang
ranks: 3
expect: @diverged
rank: 0
line: required
"""

import numpy as np
import torch
import torch.distributed as dist


class Meter:
    def __init__(self) -> None:
        self.values: list = []

    def update(self, value) -> None:
        self.values.append(value)

    def sync(self) -> float:
        sums = torch.as_tensor(self.values[-4:])
        dist.all_reduce(sums)  # FAULT
        return sums.mean().item()


def train() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    meter = Meter()
    model = torch.nn.Linear(8, 8)
    opt = torch.optim.Adam(model.parameters())
    for step in range(1, 81):
        loss = model(torch.randn(8, 8)).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        value = loss.item()
        if rank == 0 and step > 44:
            value = np.float64(value)
            meter.values = list(np.asarray(meter.values[-3:]))
        meter.update(value)
        if step % 4 == 0:
            print("rank", rank, "step", step, "mean loss", meter.sync(), flush=True)  # NEAR


train()
