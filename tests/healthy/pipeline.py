"""Stages that pass activations on and gradients back with send and recv. Only the last stage knows a loss; the first waits for all the others."""

import time

import torch
import torch.distributed as dist
from training import RANK, WORLD, arguments, finish

told = arguments(pace=0.02, micro=4, steps=60)
dist.init_process_group("gloo")
stage = torch.nn.Linear(32, 32)
optimizer = torch.optim.SGD(stage.parameters(), lr=1e-3)
for step in range(told.steps):
    for _ in range(told.micro):
        given = torch.randn(4, 32)
        if RANK > 0:
            dist.recv(given, RANK - 1)
        given.requires_grad_()
        made = stage(given)
        time.sleep(told.pace)
        if RANK < WORLD - 1:
            dist.send(made.detach(), RANK + 1)
            slope = torch.empty_like(made)
            dist.recv(slope, RANK + 1)
            made.backward(slope)
        else:
            loss = made.square().mean()
            loss.backward()
            if step % 10 == 0:
                print(f"step {step} loss: {loss.item():.4f}")
        if RANK > 0:
            assert given.grad is not None
            dist.send(given.grad, RANK - 1)
    optimizer.step()
    optimizer.zero_grad()
finish()
