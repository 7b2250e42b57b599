"""The rank is killed with SIGKILL while it holds 100 GB of the card, or 70 % of a smaller one. The memory must come back."""

import os
import signal

import torch
from moment import fault, guilty
from training import steps_on_gpu

for step in steps_on_gpu():
    if guilty(step, rank=0):
        held = torch.empty(int(min(100e9, 0.7 * torch.cuda.mem_get_info()[0])), dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        fault()
        os.kill(os.getpid(), signal.SIGKILL)
