"""new_group() is called by its members only. torch counts the groups, so that the next one has another name on the third rank, and
nobody meets there.

class: subgroups
kind: hang
ranks: 3
expect: @diverged, @hang, hang.together, gloo.connection, gloo.timeout
rank: any
line: required
"""

import torch
import torch.distributed as dist


class Parallel:
    """Ranks 0 and 1 hold the model together, rank 2 evaluates."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.tp_group = self.report_group = None

    def setup(self) -> None:
        members = [0, 1]
        if self.rank in members:
            self.tp_group = dist.new_group(members)  # FAULT
        self.report_group = dist.new_group([1, 2])  # NEAR


def main() -> None:
    dist.init_process_group("gloo")
    parallel = Parallel()
    parallel.setup()
    weight = torch.randn(8, 8, requires_grad=True)
    for _ in range(20):
        loss = (torch.randn(4, 8) @ weight).square().mean()
        loss.backward()
        dist.all_reduce(weight.grad)
        with torch.no_grad():
            weight -= 0.01 * weight.grad
            weight.grad = None
        if parallel.tp_group is not None:
            dist.all_reduce(weight.detach(), group=parallel.tp_group)
    print("done", flush=True)


main()
