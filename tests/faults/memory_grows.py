"""From step 20 on rank 1 keeps 64 MB more each step, up to 4 GB: past --ram-limit, or past its cgroup's limit."""

from moment import AT_STEP, RANK, fault, guilty
from training import steps

kept = []
for step in steps():
    if guilty(step):
        fault()
    if RANK == 1 and AT_STEP <= step < AT_STEP + 64:
        kept.append(b"x" * 64_000_000)
