"""Both ranks use cuda:0 and NCCL refuses: every rank needs a card of its own."""

import torch
import torch.distributed as dist
from moment import RANK, fault

dist.init_process_group("nccl")
torch.cuda.set_device(0)
if RANK == 1:
    fault()
dist.all_reduce(torch.ones(4, device="cuda:0"))
torch.cuda.synchronize()
