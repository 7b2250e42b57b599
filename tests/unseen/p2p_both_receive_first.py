"""Two ranks exchange gradients, and both receive first: symmetrical, nobody is to blame.

class: point-to-point
kind: hang
ranks: 2
expect: @diverged, @hang, hang.together
decidable: no
rank: none
line: all
"""

import torch
import torch.distributed as dist


def exchange(mine: torch.Tensor) -> torch.Tensor:
    other = 1 - dist.get_rank()
    theirs = torch.empty_like(mine)
    dist.recv(theirs, src=other)  # FAULT
    dist.send(mine, dst=other)
    return (mine + theirs) / 2


def main() -> None:
    dist.init_process_group("gloo")
    weight = torch.zeros(100)
    for _ in range(30):
        gradient = torch.randn(100)
        weight -= 0.1 * exchange(gradient)
    print("norm", weight.norm().item(), flush=True)


main()
