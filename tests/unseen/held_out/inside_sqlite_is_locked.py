"""Ranks share an SQLite file: rank 0 begins a transaction and trains on without a commit, rank 1 waits for the database.

class: inside-a-rank
kind: hang
ranks: 3
expect: @hang
rank: 1, 0
line: required
"""

import os
import sqlite3
import tempfile
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

PATH = os.path.join(tempfile.gettempdir(), f"samples-{os.environ['MASTER_PORT']}.sqlite")


class SampleLog:
    def __init__(self, rank: int) -> None:
        self.connection = sqlite3.connect(PATH, timeout=3600, isolation_level=None)
        if rank == 0:
            self.connection.execute("CREATE TABLE IF NOT EXISTS samples (step INTEGER, rank INTEGER, loss REAL)")
        self.rank = rank

    def start_batch(self) -> None:
        self.connection.execute("BEGIN IMMEDIATE")

    def add(self, step: int, loss: float) -> None:
        self.connection.execute("INSERT INTO samples VALUES (?, ?, ?)", (step, self.rank, loss))  # FAULT


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    log = SampleLog(rank)
    dist.barrier()
    model = DDP(torch.nn.Linear(6, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for step in range(200):
        time.sleep(0.05)
        loss = model(torch.randn(5, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0 and rank == 2:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        if step == 30 and rank == 0:
            log.start_batch()  # meant to be committed when 50 rows are there
        if rank == 0 or (rank == 1 and step % 20 == 19):
            log.add(step, loss.item())  # NEAR


main()
