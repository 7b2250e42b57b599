"""/dev/shm (1 MB of it) is too small for what rank 1's data-loader worker hands over.

torch 2.13 reserves the space first: the worker prints the error from a thread, drops the batch and lives on, and the rank waits for ever.
Where torch does not reserve it, the worker dies of a bus error.
"""

import torch
from moment import AT_STEP, RANK, fault, guilty
from torch.utils.data import DataLoader, Dataset
from training import STEPS, Training


class GrowingBatches(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        if guilty(index):
            fault()
        return torch.randn(8, 16) if index < AT_STEP or RANK != 1 else torch.randn(250_000, 16)


if __name__ == "__main__":
    batches = iter(DataLoader(GrowingBatches(), batch_size=None, num_workers=1, prefetch_factor=1))
    job = Training()
    for batch in batches:
        job.step(batch)
    job.end()
