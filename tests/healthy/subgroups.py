"""Ranks in groups of their own, the second slower or not; the world meets rarely."""

import time

import torch
import torch.distributed as dist
from training import RANK, WORLD, arguments, finish

told = arguments(pace=0.04, slower=1, rounds=4, steps=40)
dist.init_process_group("gloo")
half = WORLD // 2
groups = [dist.new_group(list(range(half))), dist.new_group(list(range(half, WORLD)))]
mine = 0 if half > RANK else 1
model = torch.nn.Linear(32, 32)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for turn in range(told.rounds):
    for _ in range(told.steps):
        loss = model(torch.randn(4, 32)).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=groups[mine])
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(told.pace * (1 + told.slower * mine))
    meeting = torch.ones(1)
    dist.all_reduce(meeting)
    print(f"group {mine} rank {RANK}: round {turn} done, {int(meeting.item())} met")
finish()
