"""Two groups with the same ranks; after some steps one rank uses them in the other order.

class: subgroups
kind: hang
ranks: 3
expect: @diverged
rank: 2
line: required
"""

import torch
import torch.distributed as dist


class Sync:
    def __init__(self) -> None:
        everyone = list(range(dist.get_world_size()))
        self.dense = dist.new_group(everyone)
        self.sparse = dist.new_group(everyone)

    def dense_first(self, a: torch.Tensor, b: torch.Tensor) -> None:
        dist.all_reduce(a, group=self.dense)
        dist.all_reduce(b, group=self.sparse)

    def sparse_first(self, a: torch.Tensor, b: torch.Tensor) -> None:
        dist.all_reduce(b, group=self.sparse)  # FAULT
        dist.all_reduce(a, group=self.dense)


dist.init_process_group("gloo")
sync = Sync()
a, b = torch.randn(64), torch.randn(64)
for step in range(100):
    x = torch.randn(4)
    if dist.get_rank() == 2 and step == 18:
        sync.sparse_first(a, b)  # NEAR
    else:
        sync.dense_first(a, b)
    a /= 3
    b /= 3
    if step % 5 == 0:
        print("iteration", step, flush=True)
