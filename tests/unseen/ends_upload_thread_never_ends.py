"""All ranks are done, but a thread of rank 0 that is no daemon waits for its next upload forever.

class: ends
kind: hang
ranks: 2
expect: @hang
rank: 0
line: required
"""

import queue
import threading

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Uploader:
    def __init__(self) -> None:
        self.queue: queue.Queue[dict] = queue.Queue()
        threading.Thread(target=self.work, name="uploader").start()

    def work(self) -> None:
        while True:
            item = self.queue.get()  # FAULT
            print("uploaded", sorted(item), flush=True)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    uploader = Uploader() if rank == 0 else None
    model = DDP(torch.nn.Linear(5, 5))
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(40):
        opt.zero_grad()
        model(torch.randn(3, 5)).square().mean().backward()
        opt.step()
        if uploader is not None and step % 20 == 19:
            uploader.queue.put(model.module.state_dict())
    dist.destroy_process_group()
    print(f"rank {rank} is done", flush=True)


main()
