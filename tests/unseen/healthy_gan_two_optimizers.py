"""Two models and two optimizers whose steps alternate, each rank with an empty batch now and then (join by zero loss).

class: healthy
kind: healthy
ranks: 3
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
generator, critic = DDP(torch.nn.Linear(4, 8)), DDP(torch.nn.Linear(8, 1))
g_opt, c_opt = torch.optim.Adam(generator.parameters()), torch.optim.Adam(critic.parameters())
for step in range(100):
    noise = torch.randn(0 if step % 13 == rank else 4, 4)
    c_opt.zero_grad()
    critic(generator(noise).detach()).sum().backward()
    c_opt.step()
    if step % 5 == 0:
        g_opt.zero_grad()
        (-critic(generator(noise)).sum()).backward()
        g_opt.step()
dist.destroy_process_group()
