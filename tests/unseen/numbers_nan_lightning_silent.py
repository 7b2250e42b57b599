"""Lightning without logging or a progress bar: the loss becomes NaN at batch 40 and stays so; nothing is printed.

class: numbers
kind: numbers
outcome: any
ranks: 2
needs: lightning
expect: @numbers
rank: any
line: none
"""

import lightning as L
import torch
from torch.utils.data import DataLoader


def entropy(p: torch.Tensor) -> torch.Tensor:
    return -(p * p.log()).sum(-1).mean()


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(10, 10)

    def training_step(self, batch, batch_idx):
        p = self.layer(batch).softmax(-1)
        if batch_idx >= 40:
            p = p - 0.2  # log of a negative number
        return entropy(p)

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
    trainer.fit(Model(), DataLoader(torch.randn(3200, 10), batch_size=4))
