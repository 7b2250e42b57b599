"""Lightning: a loader worker of rank 0 waits for a lock that was held when it was forked.

class: loader-workers
kind: hang
ranks: 2
needs: lightning
expect: hang.worker
rank: 0
line: required
"""

import os
import threading

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

CACHE_LOCK = threading.Lock()


class Cached(Dataset):
    def __len__(self) -> int:
        return 200

    def load(self, index: int) -> torch.Tensor:
        with CACHE_LOCK:  # FAULT
            return torch.randn(12)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.load(index) if index > 100 else torch.randn(12)  # NEAR


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(12, 12)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


if __name__ == "__main__":
    if os.environ["RANK"] == "0":
        CACHE_LOCK.acquire()  # another thread of this process is writing the cache
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Model(), DataLoader(Cached(), batch_size=4, num_workers=1))
