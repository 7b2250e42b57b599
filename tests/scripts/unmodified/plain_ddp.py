"""A training loop by hand, each rank on data of its own: torchrun --nproc-per-node 2 plain_ddp.py"""

import json
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

torch.manual_seed(rank)  # different on purpose: DDP gives everybody rank 0's parameters
layer = torch.nn.Linear(8, 1)
own = layer.weight.detach().clone()
model = DistributedDataParallel(layer)
began = layer.weight.detach().clone()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for _ in range(3):
    loss = model(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

flat = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
lowest, highest = flat.clone(), flat.clone()
dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
dist.all_reduce(highest, op=dist.ReduceOp.MAX)
losses = torch.zeros(world)
losses[rank] = loss.detach()
dist.all_reduce(losses)
found = {
    "rank": rank, "world": world, "local": int(os.environ["LOCAL_RANK"]), "same": torch.equal(lowest, highest),
    "moved": not torch.equal(began, layer.weight.detach()), "given": not torch.equal(own, began), "losses": losses.tolist(),
}  # fmt: skip
print("RESULT " + json.dumps(found))
time.sleep(0.3)  # gloo's own thread lets go of its last tensors: torch 2.13 can deadlock with it at exit
dist.destroy_process_group()
