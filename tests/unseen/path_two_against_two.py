"""Half of the ranks start with one collective, half with another, before any step: nobody can say which half is wrong.

class: common-path
kind: hang
ranks: 4
expect: @diverged
decidable: no
rank: none
line: all
"""

import torch
import torch.distributed as dist


def share_vocabulary() -> torch.Tensor:
    sizes = torch.zeros(3)
    dist.all_reduce(sizes)  # FAULT
    return sizes


def share_seeds() -> torch.Tensor:
    seeds = torch.zeros(1, dtype=torch.long)
    dist.broadcast(seeds, src=1)  # FAULT
    return seeds


def setup() -> None:
    if dist.get_rank() in (0, 3):
        share_vocabulary()
        share_seeds()
    else:
        share_seeds()
        share_vocabulary()


dist.init_process_group("gloo")
setup()
print("ready", flush=True)
