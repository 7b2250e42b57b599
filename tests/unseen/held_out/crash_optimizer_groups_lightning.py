"""Lightning: a checkpoint is resumed by a script that now splits the parameters into two groups (with and without weight decay).

class: framework-crashes
kind: crash
ranks: 2
needs: lightning
expect: @raised, ckpt.*, checkpoint.*
rank: any
line: required
must-mention: parameter group
"""

import os
import tempfile
import time

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class Model(L.LightningModule):
    def __init__(self, split_groups: bool) -> None:
        super().__init__()
        self.split_groups = split_groups
        self.layer = torch.nn.Linear(9, 1)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        time.sleep(0.05)
        loss = self.layer(batch[0]).square().mean()
        if index % 5 == 0 and self.global_rank == 0:
            print(f"step {self.global_step} loss {loss.item():.4f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if not self.split_groups:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)
        groups = [
            {"params": [self.layer.weight], "weight_decay": 0.1},
            {"params": [self.layer.bias], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=1e-3)


def trainer(epochs: int) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )


def main() -> None:
    rows = DataLoader(TensorDataset(torch.randn(120, 9)), batch_size=4)
    first = trainer(1)
    first.fit(Model(split_groups=False), rows)
    path = os.path.join(tempfile.gettempdir(), f"resume-{os.environ['MASTER_PORT']}.ckpt")
    first.save_checkpoint(path)
    trainer(3).fit(Model(split_groups=True), rows, ckpt_path=path)  # FAULT


main()
