"""DDP with accumulation: a rank that drops short documents counts its own micro-batches and stays in no_sync() once too often.

class: common-path
kind: hang
ranks: 3
expect: @diverged
rank: 2
line: required
"""

import contextlib
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

ACCUMULATE = 4


def documents(rank: int, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    lengths = [24, 31, 28, 40]
    if rank == 2 and step == 15:
        lengths[1] = 3  # an empty page of a crawled site
    return [torch.randn(length, 16, generator=generator) for length in lengths]


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(100):
        micro_batches = [document for document in documents(rank, step) if len(document) >= 8]
        total = torch.zeros(())
        for index, document in enumerate(micro_batches, 1):
            sync = index == ACCUMULATE
            with contextlib.nullcontext() if sync else model.no_sync():  # FAULT
                loss = model(document).square().mean() / ACCUMULATE
                loss.backward()
            total += loss.detach()
            time.sleep(0.02)
        dist.all_reduce(total)  # NEAR
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 5 == 0:
            print(f"step {step} loss {total.item() / dist.get_world_size():.4f}", flush=True)
    dist.destroy_process_group()


main()
