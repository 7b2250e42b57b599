"""A poisoned batch on rank 1 makes all weights NaN. The script knows nothing of Stoker: rank 0 prints its step lines, as most do."""

import torch
from moment import RANK, fault, guilty
from training import Training

job = Training()
for step in range(200):
    batch = torch.randn(8, 16)
    if guilty(step):
        fault()
        batch[0, 0] = float("nan")
    loss = job.step(batch)
    if RANK == 0:
        print(f"step {step} loss {loss:.4f} lr 1.00e-02", flush=True)
job.end()
