"""A scorer process is started with a pipe as stdin, and the rank waits for its end without closing the pipe.

class: inside-a-rank
kind: hang
ranks: 2
expect: hang.child
rank: 1
line: required
"""

import subprocess

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(8, 8))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(60):
    opt.zero_grad()
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    opt.step()
    if step == 25 and dist.get_rank() == 1:
        scorer = subprocess.Popen(["sort", "-n"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        scorer.stdin.write(f"{loss.item()}\n")
        scorer.stdin.flush()
        scorer.wait()  # FAULT
        print(scorer.stdout.read(), flush=True)
