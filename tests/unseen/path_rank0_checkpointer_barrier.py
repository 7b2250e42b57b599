"""A checkpointer's save() ends with a barrier, and only the main rank calls save().

class: common-path
kind: hang
ranks: 4
expect: @diverged
rank: 0
line: required
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Checkpointer:
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def save(self, model: torch.nn.Module, step: int) -> None:
        path = os.path.join(self.folder, f"step{step}.pt")
        torch.save(model.state_dict(), path)
        dist.barrier()  # FAULT
        print("saved", path, flush=True)


def main() -> None:
    dist.init_process_group("gloo")
    is_main = dist.get_rank() == 0
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)))
    opt = torch.optim.AdamW(model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        checkpointer = Checkpointer(folder)
        for step in range(1, 101):
            loss = model(torch.randn(4, 8)).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            if is_main and step % 20 == 0:
                checkpointer.save(model.module, step)  # NEAR


main()
