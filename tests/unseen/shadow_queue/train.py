"""queue.py beside the script hides the standard library's queue: torch's data loaders need it.

class: environment
kind: crash
ranks: 2
expect: env.*, launch.*, @raised
rank: any
line: required
must-mention: queue.py
"""

import torch  # FAULT
import torch.distributed as dist
from torch.utils.data import DataLoader  # NEAR

dist.init_process_group("gloo")
for batch in DataLoader(torch.randn(32, 4), batch_size=4):
    dist.all_reduce(batch)
