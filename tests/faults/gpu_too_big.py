"""The model does not fit the card: layer after layer until it is full."""

import torch
from moment import fault, guilty
from training import steps_on_gpu

for step in steps_on_gpu():
    if guilty(step, rank=0):
        layers: list[torch.Tensor] = []
        room = torch.cuda.mem_get_info()[0]
        while True:
            if len(layers) * 2e9 > room - 4e9:
                fault()  # told at each of the last layers: the last one's time stays
            layers.append(torch.zeros(500_000_000, device="cuda"))
