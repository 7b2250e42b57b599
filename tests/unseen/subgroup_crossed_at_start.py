"""Two ranks use two groups in opposite order from the first step: nobody can say which order is the right one.

class: subgroups
kind: hang
ranks: 2
expect: @diverged
decidable: no
rank: none
line: all
"""

import torch
import torch.distributed as dist


def forward_sync(t: torch.Tensor, group) -> None:
    dist.all_reduce(t, group=group)  # FAULT


def backward_sync(t: torch.Tensor, group) -> None:
    dist.all_reduce(t, group=group)  # FAULT


dist.init_process_group("gloo")
ranks = [0, 1]
forward_group, backward_group = dist.new_group(ranks), dist.new_group(ranks)
t = torch.ones(16)
steps = [lambda: forward_sync(t, forward_group), lambda: backward_sync(t, backward_group)]
for step in steps if dist.get_rank() == 0 else reversed(steps):
    step()
