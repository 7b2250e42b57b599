"""Two models with an optimizer each, as a GAN has; the second steps once for several steps of the first."""

import torch
from torch.nn.parallel import DistributedDataParallel
from training import STEP_S, Tiny, arguments, finish

told = arguments(ratio=5, steps=200)
tiny = Tiny()
critic = DistributedDataParallel(torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(critic.parameters(), lr=1e-3)
for step in range(told.steps):
    tiny.step(STEP_S)
    if step % told.ratio == 0:
        critic(tiny.batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
finish()
