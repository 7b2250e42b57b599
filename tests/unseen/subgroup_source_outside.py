"""A broadcast within a group whose source is not in the group: ValueError on its members.

class: subgroups
kind: crash
ranks: 3
expect: @raised
rank: 0, 1
line: required
must-mention: not part of group
"""

import torch
import torch.distributed as dist


def refresh(weights: torch.Tensor, group, teacher: int) -> None:
    dist.broadcast(weights, src=teacher, group=group)  # FAULT


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    students = dist.new_group([0, 1])
    weights = torch.randn(32)
    for step in range(30):
        loss = weights.square().mean()
        dist.all_reduce(loss)
        if step % 10 == 9 and rank in (0, 1):
            refresh(weights, students, teacher=2)  # NEAR
    dist.barrier()


main()
