"""From step 5 on rank 1's data loader needs 0.9 s longer than the others' for a batch. The job completes."""

import time

import torch
from moment import RANK, fault
from torch.utils.data import DataLoader, Dataset
from training import Training


class SlowBatches(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> torch.Tensor:
        if RANK == 1 and index >= 5:
            if index == 5:
                fault()
            time.sleep(0.9)
        return torch.randn(8, 16)


if __name__ == "__main__":
    batches = iter(DataLoader(SlowBatches(), batch_size=None, num_workers=1, prefetch_factor=1))
    job = Training()
    for batch in batches:
        job.step(batch)
    job.end()
