"""One rank skips a batch whole, makes one step less, and ends while the others wait for its last gradients.

class: common-path
kind: hang
ranks: 3
expect: @diverged, rank.early-exit
rank: 1
line: none
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = DDP(torch.nn.Linear(32, 4))
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = [torch.randn(6, 32) for _ in range(40)]
if rank == 1:
    data[17] = data[17][:0]

for step, batch in enumerate(data):
    if len(batch) == 0:
        continue
    loss = model(batch).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(f"[rank {rank}] step {step} loss {loss.item():.4f}", flush=True)
print(f"[rank {rank}] done", flush=True)
