"""Plain DDP on gloo with one of the mistakes of mistakes.py. `python style_plain.py MISTAKE GUILTY`"""

import time

import torch
import torch.distributed as dist
from mistakes import WIDTH, WORKERS, Samples, at_step, guilty, length
from moment import RANK, fault
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.second = torch.nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())  # line: shape


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Samples(length()), batch_size=None, num_workers=WORKERS, prefetch_factor=1 if WORKERS else None)
    for step, batch in enumerate(loader):
        at_step(step)
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        if RANK == 0:
            print(f"step {step} | loss {loss.item():.4f} | lr 1.00e-03", flush=True)
    if guilty():
        fault()
    dist.barrier()  # line: fewer-batches
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
