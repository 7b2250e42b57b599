"""Samples come from a coroutine that awaits a future nobody resolves.

class: inside-a-rank
kind: hang
ranks: 2
expect: @hang
rank: 0
line: required
"""

import asyncio

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Rollouts:
    def __init__(self, rank: int) -> None:
        self.rank, self.count = rank, 0

    async def sample(self) -> torch.Tensor:
        self.count += 1
        await asyncio.sleep(0.01)
        if self.rank == 0 and self.count == 30:
            await asyncio.get_running_loop().create_future()  # FAULT
        return torch.randn(4, 8)

    async def batch(self) -> torch.Tensor:
        return torch.cat(await asyncio.gather(self.sample(), self.sample()))  # NEAR


def main() -> None:
    dist.init_process_group("gloo")
    rollouts = Rollouts(dist.get_rank())
    model = DDP(torch.nn.Linear(8, 8))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(40):
        x = asyncio.run(rollouts.batch())  # NEAR
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()


main()
