"""Rank 1 has 20 batches and the others more: it waits in the final barrier while they are in their next step."""

from moment import AT_STEP, RANK, fault
from training import STEPS, Training

job = Training()
for _ in range(AT_STEP if RANK == 1 else STEPS):
    job.step()
if RANK == 1:
    fault()
job.end()
