"""The script asks for GPU 63 of a machine that has fewer."""

import torch
from moment import fault, guilty
from training import steps_on_gpu

for step in steps_on_gpu():
    if guilty(step, rank=0):
        fault()
        torch.ones(4, device="cuda:63")
