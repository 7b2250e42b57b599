"""accelerate: a collate function in a loader worker of rank 1 reads from a pipe that stays empty.

class: loader-workers
kind: hang
ranks: 2
needs: accelerate
expect: hang.worker
rank: 1
line: required
"""

import os

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader


class Collator:
    def __init__(self, rank: int) -> None:
        self.rank, self.count = rank, 0
        self.read_end, self.write_end = os.pipe()

    def settings(self) -> bytes:
        return os.read(self.read_end, 100)  # FAULT

    def __call__(self, rows: list[torch.Tensor]) -> torch.Tensor:
        self.count += 1
        if self.rank == 1 and self.count == 25:
            self.settings()  # NEAR
        return torch.stack(rows)


accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(7, 7)
loader = DataLoader(
    [torch.randn(7) for _ in range(800)], batch_size=4, collate_fn=Collator(accelerator.process_index), num_workers=1
)
model, opt, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
for batch in loader:
    opt.zero_grad()
    loss = model(batch).square().mean()
    accelerator.backward(loss)
    opt.step()
