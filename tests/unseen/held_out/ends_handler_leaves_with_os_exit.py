"""A handler for the batch system's warning signal saves the model and leaves with os._exit(3).

class: ends
kind: crash
ranks: 2
expect: rank.exit
rank: 0
line: none
"""

import os
import signal
import tempfile
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Preemption:
    """Saves the model when SIGUSR1 announces the end of the time slot."""

    def __init__(self, model: torch.nn.Module, folder: str) -> None:
        self.model, self.folder = model, folder
        signal.signal(signal.SIGUSR1, self.save_and_leave)

    def save_and_leave(self, number: int, frame: object) -> None:
        torch.save(self.model.state_dict(), os.path.join(self.folder, "last.pt"))
        os._exit(3)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if rank == 0:
        Preemption(model, tempfile.mkdtemp())
    for step in range(400):
        if rank == 0 and step == 40:
            os.kill(os.getpid(), signal.SIGUSR1)  # the batch system warns the first process of the job only
        time.sleep(0.05)
        loss = torch.nn.functional.cross_entropy(model(torch.randn(8, 8)), torch.randint(0, 2, (8,)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 and rank == 1:
            print(f"[{step:4d}] {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


main()
