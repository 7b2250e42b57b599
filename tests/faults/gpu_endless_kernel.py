"""A kernel that does not end (about half an hour of clock cycles), and the rank waits for its result."""

import torch
from moment import fault, guilty
from training import steps_on_gpu

for step in steps_on_gpu():
    if guilty(step, rank=0):
        loss = torch.ones(1, device="cuda")
        fault()
        torch.cuda._sleep(2**42)
        loss.add(1).item()
