"""torch.py beside the script hides torch.

class: environment
kind: crash
ranks: 2
expect: env.*, launch.*, @raised
rank: any
line: required
must-mention: torch.py
"""

import torch.distributed as dist  # FAULT

dist.init_process_group("gloo")
dist.barrier()
