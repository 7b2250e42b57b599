"""Rank 1 adds two tensors of different devices. The meta device is one that every build of torch has."""

import torch
from moment import fault, guilty
from training import steps

for step in steps():
    if guilty(step):
        fault()
        torch.ones(4) + torch.ones(4, device="meta")
