"""accelerate: worker_init_fn waits for an index file that was removed after the first epoch; the workers start again each epoch.

class: loader-workers
kind: hang
ranks: 2
needs: accelerate
expect: hang.worker, @hang
rank: 1
line: required
"""

import os
import tempfile
import time

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset

INDEX = os.path.join(tempfile.mkdtemp(), "index.idx")


class Rows(Dataset):
    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.002)
        return torch.randn(8, generator=torch.Generator().manual_seed(index))


def open_index(worker: int) -> None:
    while not os.path.exists(INDEX):
        time.sleep(0.5)  # FAULT
    with open(INDEX) as file:
        assert file.read() == "400 rows"


def write_index() -> None:
    with open(INDEX, "w") as file:
        file.write("400 rows")


def main() -> None:
    accelerator = Accelerator(cpu=True)
    write_index()
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Rows(), batch_size=8, num_workers=1, worker_init_fn=open_index)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(6):
        for batch in loader:  # NEAR
            time.sleep(0.05)
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
        if accelerator.process_index == 1:
            os.remove(INDEX)  # cleans the scratch folder of its node


if __name__ == "__main__":
    main()
