"""All steps are done; then one rank's report raises.

class: ends
kind: crash
ranks: 3
expect: @raised
rank: 1
line: required
must-mention: ZeroDivisionError
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Report:
    def __init__(self) -> None:
        self.correct = 0
        self.total = 0

    def add(self, correct: int, total: int) -> None:
        self.correct += correct
        self.total += total

    @property
    def accuracy(self) -> float:
        return self.correct / self.total  # FAULT


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(torch.nn.Linear(5, 5))
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    report = Report()
    for _ in range(40):
        opt.zero_grad()
        model(torch.randn(3, 5)).square().mean().backward()
        opt.step()
        if rank != 1:
            report.add(1, 3)
    dist.barrier()
    dist.destroy_process_group()
    print(f"rank {rank}: accuracy {report.accuracy:.2f}", flush=True)  # NEAR


main()
