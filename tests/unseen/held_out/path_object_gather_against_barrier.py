"""Validation: the rank whose shard of the validation set is empty waits at a barrier, the others gather their predictions.

class: common-path
kind: hang
ranks: 4
expect: @diverged
rank: 3
line: required
"""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

VALIDATION = 10  # rows; dealt out in blocks of 4, so the last rank has none


class Evaluator:
    def __init__(self, model: DDP, rank: int, world_size: int) -> None:
        self.model, self.world_size = model.module, world_size
        rows = torch.arange(VALIDATION).float().unsqueeze(1).expand(-1, 6)
        self.rows = rows[rank * 4 : (rank + 1) * 4]

    @torch.no_grad()
    def predict(self) -> list[float]:
        return [self.model(row).item() for row in self.rows]

    def run(self) -> float | None:
        if not len(self.rows):
            dist.barrier()  # FAULT
            return None
        gathered: list[list[float] | None] = [None] * self.world_size
        dist.all_gather_object(gathered, self.predict())
        return sum(sum(values) for values in gathered if values) / VALIDATION


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DDP(torch.nn.Linear(6, 1))
    evaluator = Evaluator(model, rank, world_size)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(1, 200):
        time.sleep(0.1)
        loss = model(torch.randn(8, 6)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0 and rank == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
        if step % 20 == 0:
            score = evaluator.run()  # NEAR
            if rank == 0:
                print(f"step {step}: validation {score:.3f}", flush=True)


main()
