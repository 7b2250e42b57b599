"""Rank 1 opens shard after shard and closes none, under a limit of 256 descriptors."""

import resource

from moment import fault, guilty
from training import steps

for step in steps():
    if guilty(step):
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        fault()
        shards = [open(__file__, "rb") for _ in range(300)]  # noqa: SIM115  that they stay open is the fault
