"""Lightning with validation, a progress bar and synced metrics.

class: healthy
kind: healthy
ranks: 2
needs: lightning
"""

import lightning as L
import torch
from torch.utils.data import DataLoader


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(10, 10)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).square().mean()
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    data = torch.randn(400, 10)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, logger=False, enable_checkpointing=False
    )
    trainer.fit(Model(), DataLoader(data, batch_size=4), DataLoader(data, batch_size=16))
