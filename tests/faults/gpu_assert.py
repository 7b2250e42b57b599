"""A token id beyond the vocabulary: a device-side assert in the embedding's kernel."""

import torch
from moment import fault, guilty
from training import steps_on_gpu

for step in steps_on_gpu():
    if guilty(step, rank=0):
        embedding = torch.nn.Embedding(1000, 16, device="cuda")
        fault()
        embedding(torch.tensor([5, 1_000_000], device="cuda")).sum().item()
