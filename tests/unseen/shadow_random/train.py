"""random.py beside the script hides the standard library's random, and imports torch itself: a circular import.

class: environment
kind: crash
ranks: 2
expect: env.*, launch.*, @raised
rank: any
line: required
must-mention: random.py
"""

import random  # NEAR

import torch  # FAULT
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
for _ in range(10):
    model(random.batch(8)).sum().backward()
