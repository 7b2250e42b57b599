"""Lightning: a loader worker of rank 1 dies of a segmentation fault.

class: loader-workers
kind: crash
ranks: 2
needs: lightning
expect: data.worker-died
rank: 1
line: none
"""

import ctypes
import os

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset


class Video(Dataset):
    def __len__(self) -> int:
        return 200

    def frame(self, index: int) -> torch.Tensor:
        if os.environ["RANK"] == "1" and index >= 100:
            ctypes.string_at(8)
        return torch.randn(12)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.frame(index)


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(12, 12)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


if __name__ == "__main__":
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Model(), DataLoader(Video(), batch_size=4, num_workers=1))
