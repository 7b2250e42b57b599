"""A forked process copies a lock that a thread of its parent holds: it waits for ever, and the rank joins it.

class: inside-a-rank
kind: hang
ranks: 2
expect: @hang
rank: 0
line: required
"""

import multiprocessing
import threading
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class MetricStore:
    """Collects metrics; a thread writes them out."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.rows: list[dict[str, float]] = []
        threading.Thread(target=self.flush_forever, daemon=True).start()

    def add(self, **values: float) -> None:
        with self.lock:
            self.rows.append(values)

    def flush_forever(self) -> None:
        while True:
            with self.lock:
                self.rows = self.rows[-100:]
                time.sleep(0.08)  # a slow disk
            time.sleep(0.02)


def export(store: MetricStore, step: int) -> None:
    store.add(exported=step)


def export_in_process(store: MetricStore, step: int) -> None:
    while not store.lock.locked():
        time.sleep(0.001)
    process = multiprocessing.get_context("fork").Process(target=export, args=(store, step))
    process.start()
    process.join()  # FAULT


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    store = MetricStore()
    model = DDP(torch.nn.Linear(9, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, 200):
        time.sleep(0.05)
        loss = torch.nn.functional.cross_entropy(model(torch.randn(8, 9)), torch.randint(0, 3, (8,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        store.add(step=step, loss=loss.item())
        if step % 5 == 0 and rank == 1:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        if step == 25 and rank == 0:
            export_in_process(store, step)  # NEAR


if __name__ == "__main__":
    main()
