"""Two groups of two ranks; one rank leaves out its group's all-reduce and goes to the one of all ranks.

class: subgroups
kind: hang
ranks: 4
expect: @diverged
rank: 3
line: required
"""

import torch
import torch.distributed as dist


def sync_experts(model: torch.nn.Module, group, tokens: int) -> None:
    if tokens == 0:
        return  # FAULT
    for p in model.parameters():
        dist.all_reduce(p.grad, group=group)  # NEAR


def sync_stats(loss: torch.Tensor) -> None:
    stats = torch.stack([loss.detach(), torch.ones(())])
    dist.all_reduce(stats)  # NEAR


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    expert = torch.nn.Linear(8, 8)
    opt = torch.optim.SGD(expert.parameters(), lr=0.01)
    for step in range(100):
        tokens = 0 if rank == 3 and step == 25 else 16
        loss = expert(torch.randn(16, 8)).square().mean()
        opt.zero_grad()
        loss.backward()
        sync_experts(expert, groups[rank // 2], tokens)
        opt.step()
        sync_stats(loss)
    dist.destroy_process_group()


main()
