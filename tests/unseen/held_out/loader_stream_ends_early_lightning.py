"""Lightning: the stream of one rank has fewer shards; its epoch ends and it gathers the predictions while the others train on.

class: loader-workers
kind: hang
ranks: 3
needs: lightning
expect: @diverged
rank: 2
line: required
"""

import time

import lightning as L
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

SHARDS = {0: 40, 1: 40, 2: 22}


class Shards(IterableDataset):
    def __iter__(self):
        count = SHARDS[dist.get_rank() if dist.is_initialized() else 0]
        for index in range(count):
            generator = torch.Generator().manual_seed(index)
            for _ in range(4):
                yield torch.randn(10, generator=generator)


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(10, 1)
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        time.sleep(0.08)
        loss = self.layer(batch).square().mean()
        self.losses.append(loss.detach())
        if index % 5 == 0 and self.global_rank == 0:
            print(f"step {index} loss {loss.item():.4f}", flush=True)
        return loss

    def on_train_epoch_end(self) -> None:
        last = self.all_gather(torch.stack(self.losses[-10:]))  # FAULT
        if self.global_rank == 0:
            print(f"mean loss {last.mean().item():.4f}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main() -> None:
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy="ddp",
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), DataLoader(Shards(), batch_size=4, num_workers=0))


main()
