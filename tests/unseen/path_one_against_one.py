"""Two ranks, and the first collective of each is another one: both lines have to be named, nobody blamed.

class: common-path
kind: hang
ranks: 2
expect: @diverged
decidable: no
rank: none
line: all
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    sizes = [None, None]
    dist.all_gather_object(sizes, 128)  # FAULT
else:
    dist.barrier()  # FAULT
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
for _ in range(10):
    model(torch.randn(2, 2)).sum().backward()
