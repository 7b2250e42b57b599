"""A loader worker returns a row with a function in it: the worker prints a PicklingError and drops the row, the rank waits for it.

class: loader-workers
kind: hang
ranks: 3
expect: hang.worker, @hang, @raised, data.*
rank: 0
line: required
"""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Images(Dataset):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 600

    def __getitem__(self, index: int) -> dict[str, object]:
        image = torch.randn(3, 4, generator=torch.Generator().manual_seed(index))
        row: dict[str, object] = {"image": image, "restore": None}
        if self.rank == 0 and index == 240:
            row["restore"] = lambda output: output * image.std()  # FAULT
        return row


def collate(rows: list[dict[str, object]]) -> dict[str, object]:
    return {"images": torch.stack([row["image"] for row in rows]), "restore": [row["restore"] for row in rows]}


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dataset = Images(rank)
    sampler = DistributedSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler, collate_fn=collate, num_workers=1)
    model = DDP(torch.nn.Linear(4, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for step, batch in enumerate(loader):  # NEAR
            time.sleep(0.05)
            loss = (model(batch["images"]) - batch["images"]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 1 and step % 5 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
