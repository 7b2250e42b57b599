"""A collate function misses a key in one row, on rank 0, without workers.

class: framework-crashes
kind: crash
ranks: 2
expect: @raised
rank: 0
line: required
must-mention: KeyError
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

rank = 0


class Pad:
    def __init__(self, keys: list[str]) -> None:
        self.keys = keys

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        return {key: torch.stack([row[key] for row in rows]) for key in self.keys}  # FAULT


def make_rows(count: int, broken: int | None) -> list[dict]:
    rows = [{"x": torch.randn(6), "weight": torch.rand(())} for _ in range(count)]
    if broken is not None:
        del rows[broken]["weight"]
    return rows


def main() -> None:
    dist.init_process_group("gloo")
    rows = make_rows(160, 101 if dist.get_rank() == 0 else None)
    model = DDP(torch.nn.Linear(6, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in DataLoader(rows, batch_size=4, collate_fn=Pad(["x", "weight"])):
        opt.zero_grad()
        (model(batch["x"]).squeeze(-1) * batch["weight"]).square().mean().backward()
        opt.step()


main()
