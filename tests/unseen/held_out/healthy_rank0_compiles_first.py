"""Rank 0 compiles the model and fills the cache, the others wait for it for seconds and compile afterwards.

class: healthy
kind: healthy
ranks: 3
"""

import contextlib
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


@contextlib.contextmanager
def rank0_first():
    if dist.get_rank() != 0:
        dist.barrier()
    yield
    if dist.get_rank() == 0:
        dist.barrier()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(8, 24), *(Block(24) for _ in range(6)), nn.Linear(24, 1))
    compiled = torch.compile(model, backend="aot_eager")
    with rank0_first():
        start = time.time()
        compiled(torch.randn(4, 8)).sum().backward()
        if rank == 0:
            time.sleep(12)  # autotuning, which the cache spares the others
        print(f"rank {rank}: compiled in {time.time() - start:.1f} s", flush=True)
    model.zero_grad(set_to_none=True)
    wrapped = DDP(compiled)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    for step in range(100):
        time.sleep(0.05)
        x = torch.randn(4, 8)
        loss = (wrapped(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


main()
