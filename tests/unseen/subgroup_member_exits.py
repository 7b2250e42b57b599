"""A rank returns from its evaluation and ends with 0 while the other of its pair waits for it.

class: subgroups
kind: hang
ranks: 4
expect: rank.early-exit, @diverged
rank: 2
line: none
"""

import sys

import torch
import torch.distributed as dist


def evaluate(rank: int, group, rows: int) -> float:
    total = torch.zeros(1)
    for i in range(rows):
        total += torch.randn(8).square().mean()
        dist.all_reduce(total, group=group)
        if rank == 2 and i == 40:
            print("nothing left to evaluate", flush=True)
            sys.exit(0)
    return total.item()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    trainers, evaluators = dist.new_group([0, 1]), dist.new_group([2, 3])
    if rank >= 2:
        print("score", evaluate(rank, evaluators, 60), flush=True)
    else:
        model = torch.nn.Linear(8, 8)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(60):
            opt.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            dist.all_reduce(model.weight.grad, group=trainers)
            opt.step()
    dist.barrier()


main()
