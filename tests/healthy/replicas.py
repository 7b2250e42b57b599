"""Independent replicas without any process group: each has its own pace, and the fast ones end long before the slow ones."""

import time

import torch
from training import RANK, arguments

told = arguments(pace=0.03, steps=150)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(told.steps):
    loss = model(torch.randn(8, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(told.pace * (1 + RANK))
    if step % 20 == 0:
        print(f"replica {RANK} step {step} loss {loss.item():.3f}")
