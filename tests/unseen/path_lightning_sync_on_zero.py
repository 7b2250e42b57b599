"""Lightning: self.log(..., sync_dist=True) under is_global_zero.

class: common-path
kind: hang
ranks: 2
needs: lightning
expect: @diverged
rank: 0
line: required
"""

import os

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.net(x), y)
        if batch_idx % 10 == 9 and self.trainer.is_global_zero:
            self.log("train/loss", loss, sync_dist=True)  # FAULT
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    data = TensorDataset(torch.randn(512, 16), torch.randint(0, 4, (512,)))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(), DataLoader(data, batch_size=8))
