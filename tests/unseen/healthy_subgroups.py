"""Tensor- and data-parallel groups of two, with point-to-point messages between them.

class: healthy
kind: healthy
ranks: 4
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
tensor = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
data = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
model = torch.nn.Linear(8, 8)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(150):
    h = model(torch.randn(4, 8))
    dist.all_reduce(h.detach().clone(), group=tensor)
    opt.zero_grad()
    h.square().mean().backward()
    dist.all_reduce(model.weight.grad, group=data)
    opt.step()
    if step % 10 == 0:
        note = torch.full((1,), float(step))
        if rank == 0:
            dist.send(note, dst=3)
        elif rank == 3:
            dist.recv(note, src=0)
    if step % 50 == 0 and rank < 2:  # the pair's own evaluation
        dist.barrier(group=tensor)
dist.barrier()
dist.destroy_process_group()
