"""A LightningModule and Lightning's Trainer with one of the mistakes of mistakes.py. `python style_lightning.py MISTAKE GUILTY`"""

import os
import warnings

import lightning
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from mistakes import STEPS, WIDTH, WORKERS, Samples, at_step
from moment import WORLD
from torch.utils.data import DataLoader

warnings.filterwarnings("ignore")


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.second = torch.nn.Linear(WIDTH, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        at_step(batch_idx)
        loss = self.second(self.first(batch).relu()).square().mean()  # line: shape
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    torch.set_num_threads(1)
    lightning.seed_everything(0, verbose=False)
    loader = DataLoader(Samples(STEPS), batch_size=None, num_workers=WORKERS, prefetch_factor=1 if WORKERS else None)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy="ddp",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[TQDMProgressBar(refresh_rate=1)],
        default_root_dir=os.environ.get("FAULTS_DIR", "."),
    )
    trainer.fit(Model(), loader)


if __name__ == "__main__":
    main()
