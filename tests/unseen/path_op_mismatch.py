"""Weights are averaged every few steps; one rank broadcasts where the others all-reduce.

class: common-path
kind: hang
ranks: 3
expect: @diverged
rank: 2
line: required
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

for step in range(100):
    loss = model(torch.randn(4, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    flat = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    if step >= 10 and rank == world - 1:
        dist.broadcast(flat, src=0)  # FAULT
    else:
        dist.all_reduce(flat)
        flat /= world
    torch.nn.utils.vector_to_parameters(flat, model.parameters())
    if rank == 0:
        print("step", step, "loss", loss.item(), flush=True)
dist.barrier()
