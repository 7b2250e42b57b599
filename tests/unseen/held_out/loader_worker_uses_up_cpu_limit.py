"""A loader worker uses up its limit of CPU time (ulimit -t) and is killed by the kernel.

class: loader-workers
kind: crash
ranks: 3
expect: data.worker-died
rank: 2
line: required
"""

import resource
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


def limit_cpu_time(worker: int) -> None:
    """Sets the limit that a login node sets, to a second from now."""
    used = int(time.process_time()) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (used, used))


class Augmented(IterableDataset):
    def __init__(self, heavy: bool) -> None:
        self.heavy = heavy

    def __iter__(self):
        for index in range(400):
            row = torch.randn(16, generator=torch.Generator().manual_seed(index))
            if self.heavy and index > 40:
                for _ in range(20000):
                    row = row * 0.5 + row.roll(1) * 0.5
            yield row


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    limit = limit_cpu_time if rank == 2 else None
    loader = DataLoader(Augmented(rank == 2), batch_size=4, num_workers=1, worker_init_fn=limit)
    model = DDP(torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step, batch in enumerate(loader):  # FAULT
        time.sleep(0.05)
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
