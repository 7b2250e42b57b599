"""The healthy job that every fault script breaks: a tiny DDP model on gloo, 50 ms a step.

for step in steps():          yields before each step; what the loop's body does there is the fault
    if guilty(step):
        fault()
        raise ValueError("boom")
"""

from __future__ import annotations

import datetime
import gc
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from moment import guilty
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

STEP_S = 0.05
STEPS = 1000


class Training:
    """Entering the process group, a step, and a good end."""

    def __init__(self, step_s: float = STEP_S, timeout_s: float = 1800.0) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout_s))
        self.step_s = step_s
        self.model = DistributedDataParallel(torch.nn.Linear(16, 16))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        gc.freeze()  # Python looks for garbage when it ends: among all that torch is made of, a second of CPU time

    def step(self, batch: torch.Tensor | None = None) -> float:
        """One step, padded to its time. Returns the loss."""
        due = time.monotonic() + self.step_s
        loss = self.model(torch.randn(8, 16) if batch is None else batch).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        time.sleep(max(0.0, due - time.monotonic()))
        return float(loss.detach())

    def end(self, together: bool = True) -> None:
        if together:
            dist.barrier()
        time.sleep(0.3)  # torch 2.13: a process group destroyed too soon after its last work can deadlock or abort
        dist.destroy_process_group()


def steps(count: int = STEPS, step_s: float = STEP_S, timeout_s: float = 1800.0) -> Iterator[int]:
    job = Training(step_s, timeout_s)
    for step in range(count):
        yield step
        job.step()
    job.end()


class Batches(Dataset[torch.Tensor]):
    """One batch per index. The guilty rank's batch of the fault's step calls `broken`, in the worker that makes it."""

    def __init__(self, broken: Callable[[], None]) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        if guilty(index):
            self.broken()
        return torch.randn(8, 16)


def train_with_workers(broken: Callable[[], None]) -> None:
    """The same job, its batches made by two data-loader workers that are at most one batch each ahead."""
    batches = iter(DataLoader(Batches(broken), batch_size=None, num_workers=2, prefetch_factor=1))
    job = Training()
    for batch in batches:
        job.step(batch)
    job.end()


def steps_on_gpu(count: int = STEPS) -> Iterator[int]:
    """A job of one rank on its card, without a process group."""
    model = torch.nn.Linear(256, 256, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(count):
        yield step
        loss = model(torch.randn(8, 256, device="cuda")).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()
        time.sleep(STEP_S)
