"""numbers.py beside the script hides the standard library's module of that name: `import torch` (by way of numpy or fractions) fails.

class: environment
kind: crash
ranks: 2
expect: env.*, launch.*, @raised
rank: any
line: required
must-mention: numbers.py
"""

from numbers import thousands

import torch  # FAULT
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
print(thousands(sum(p.numel() for p in model.parameters())))
