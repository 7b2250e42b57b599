"""Lightning's Trainer with strategy ddp, three steps: torchrun --nproc-per-node 2 lightning_ddp.py"""

import hashlib
import json
import os

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class Line(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: tuple, _index: int) -> torch.Tensor:
        inputs, wanted = batch
        return torch.nn.functional.mse_loss(self.layer(inputs), wanted)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    lightning.seed_everything(0, verbose=False)
    model = Line()
    before = model.layer.weight.detach().clone()
    data = DataLoader(TensorDataset(torch.randn(24, 4), torch.randn(24, 1)), batch_size=2)
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    environment = trainer.strategy.cluster_environment
    trainer.fit(model, data)
    weight = model.layer.weight.detach()
    found = {
        "environment": type(environment).__name__,
        "launches_itself": not environment.creates_processes_externally,
        "steps": trainer.global_step,
        "rank": trainer.global_rank,
        "world": trainer.world_size,
        "pid": os.getpid(),
        "moved": not torch.equal(before, weight),
        "after": hashlib.sha256(weight.numpy().tobytes()).hexdigest(),
    }
    print("RESULT " + json.dumps(found))


if __name__ == "__main__":
    main()
