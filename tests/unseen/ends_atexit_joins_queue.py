"""An atexit handler of rank 1 waits until its queue of metrics is written; the writer has stopped at an odd item.

class: ends
kind: hang
ranks: 3
expect: @hang
rank: 1
line: required
"""

import atexit
import json
import queue
import threading

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class MetricsWriter:
    def __init__(self) -> None:
        self.queue: queue.Queue[dict] = queue.Queue()
        threading.Thread(target=self.write, daemon=True).start()
        atexit.register(self.close)

    def write(self) -> None:
        while True:
            json.dumps(self.queue.get())  # NEAR
            self.queue.task_done()

    def close(self) -> None:
        self.queue.join()  # FAULT


def main() -> None:
    dist.init_process_group("gloo")
    writer = MetricsWriter()
    model = DDP(torch.nn.Linear(5, 5))
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(40):
        opt.zero_grad()
        loss = model(torch.randn(3, 5)).square().mean()
        loss.backward()
        opt.step()
        writer.queue.put({"step": step, "loss": loss if dist.get_rank() == 1 else loss.item()})
    dist.destroy_process_group()


main()
