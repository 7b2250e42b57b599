"""Lightning: the validation step of one rank sees an empty confusion matrix and raises.

class: framework-crashes
kind: crash
ranks: 2
needs: lightning
expect: @raised
rank: 1
line: required
must-mention: ZeroDivisionError
"""

import lightning as L
import torch
from torch.utils.data import DataLoader


def precision(hits: int, total: int) -> float:
    return hits / total  # FAULT


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(10, 2)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        predicted = self.layer(batch).argmax(-1)
        total = len(predicted) if self.global_rank == 0 or self.current_epoch == 0 else 0
        self.print("precision", precision(int(predicted.sum()), total))  # NEAR

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


if __name__ == "__main__":
    data = torch.randn(160, 10)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Model(), DataLoader(data, batch_size=4), DataLoader(data, batch_size=16))
