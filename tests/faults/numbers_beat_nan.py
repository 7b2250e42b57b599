"""A poisoned batch makes rank 1's loss NaN at step 20, a step later everybody's. The script tells its loss with stoker.beat."""

import torch
from moment import fault, guilty
from training import Training

try:
    from stoker import beat
except ImportError:

    def beat(step: int | None = None, loss: float | None = None, tokens: int | None = None) -> None:
        """Not under Stoker."""


job = Training()
for step in range(200):
    batch = torch.randn(8, 16)
    if guilty(step):
        fault()
        batch[0, 0] = float("nan")
    beat(step=step, loss=job.step(batch))
job.end()
