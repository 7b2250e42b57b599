"""The training loop and a statistics thread take two locks in opposite order.

class: inside-a-rank
kind: hang
ranks: 3
expect: @hang
rank: 2
line: required
"""

import threading
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Stats:
    def __init__(self) -> None:
        self.values_lock, self.file_lock = threading.Lock(), threading.Lock()
        self.values: list[float] = []

    def add(self, value: float, slowly: bool) -> None:
        with self.values_lock:
            self.values.append(value)
            if slowly:
                time.sleep(0.5)
            if len(self.values) % 10 == 0:
                with self.file_lock:  # FAULT
                    self.values.clear()

    def flush(self) -> None:
        with self.file_lock:
            time.sleep(0.2)
            with self.values_lock:  # NEAR
                self.values.clear()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    stats = Stats()
    model = DDP(torch.nn.Linear(8, 8))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, 60):
        opt.zero_grad()
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        opt.step()
        if rank == 2 and step == 30:
            threading.Thread(target=stats.flush, daemon=True).start()
        stats.add(loss.item(), slowly=rank == 2 and step == 30)  # NEAR


main()
