"""After the last step rank 0 waits at a barrier that the others don't come to: they end well.

class: ends
kind: hang
ranks: 3
expect: @diverged
rank: 0
line: required
"""

import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def finish(model: torch.nn.Module, rank: int) -> None:
    if rank == 0:
        with tempfile.NamedTemporaryFile() as file:
            torch.save(model.state_dict(), file)
        dist.barrier()  # FAULT
        print("saved", flush=True)


def main() -> None:
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(4, 4))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(40):
        opt.zero_grad()
        model(torch.randn(4, 4)).square().mean().backward()
        opt.step()
    finish(model.module, dist.get_rank())


if __name__ == "__main__":
    main()
