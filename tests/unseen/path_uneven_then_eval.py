"""DDP where one rank's shard has fewer batches: it goes on to the evaluation while the others are in backward.

class: common-path
kind: hang
ranks: 3
expect: @diverged
rank: 1
line: required
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


def make_loader(rank: int) -> DataLoader:
    rows = 320 - (8 * 3 if rank == 1 else 0)  # shards were cut by file size
    return DataLoader(TensorDataset(torch.randn(rows, 20), torch.randint(0, 5, (rows,))), batch_size=8, shuffle=True)


@torch.no_grad()
def evaluate(model: torch.nn.Module) -> float:
    hits = (model(torch.randn(64, 20)).argmax(-1) == 0).float().sum()
    dist.all_reduce(hits)  # FAULT
    return hits.item() / (64 * dist.get_world_size())


def main() -> None:
    dist.init_process_group("gloo")
    loader = make_loader(dist.get_rank())
    model = DDP(torch.nn.Linear(20, 5))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        accuracy = evaluate(model.module)  # NEAR
        print(f"epoch {epoch} accuracy {accuracy:.3f}", flush=True)


main()
