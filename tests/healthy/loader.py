"""A data loader with workers whose batches are slow now and then: the ranks wait for data, and that is nobody's fault."""

import random
import time

import torch
from torch.utils.data import DataLoader, Dataset
from training import RANK, Tiny, arguments, finish


class Slow(Dataset[torch.Tensor]):
    """Every `every`-th sample comes from far away."""

    def __init__(self, length: int, every: int, seconds: float) -> None:
        self.length, self.every, self.seconds = length, every, seconds

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds if index % self.every == self.every - 1 else random.uniform(0, 0.02))
        return torch.full((64,), float(index))


def main() -> None:
    told = arguments(seconds=8.0, every=70, workers=2, context="fork", steps=140)
    tiny = Tiny()
    batches = DataLoader(
        Slow(told.steps, told.every, told.seconds),
        batch_size=1,
        num_workers=told.workers,
        multiprocessing_context=told.context,
    )
    for batch in batches:
        tiny.batch = batch.expand(16, 64) / 1000
        tiny.step(0.02)
    print(f"[rank {RANK}] {tiny.steps} batches")
    finish()


if __name__ == "__main__":
    main()
