"""The loss explodes from step 20 on: half as much again each step, on every rank, and never NaN."""

from moment import AT_STEP, RANK, fault
from training import Training

try:
    from stoker import beat
except ImportError:

    def beat(step: int | None = None, loss: float | None = None, tokens: int | None = None) -> None:
        """Not under Stoker."""


job = Training()
for step in range(200):
    loss = 2.0 + job.step()
    if step == AT_STEP and RANK == 1:
        fault()
    beat(step=step, loss=loss * 1.5 ** min(60, max(0, step - AT_STEP)))
job.end()
