"""Every parameter is frozen but one that the loss does not depend on: the loss stays exactly the same, and the job completes.

class: numbers
kind: numbers
outcome: completes
ranks: 2
expect: @flat
rank: any
line: none
"""

import torch
import torch.distributed as dist


def freeze(model: torch.nn.Module) -> None:
    for name, p in model.named_parameters():
        p.requires_grad = name.startswith("unused")


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(8, 8)
        self.unused = torch.nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) + 0 * self.unused


dist.init_process_group("gloo")
torch.manual_seed(0)
model = Net()
freeze(model)
model = torch.nn.parallel.DistributedDataParallel(model)
opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
x, y = torch.randn(32, 8), torch.randn(32, 8)
for step in range(400):
    opt.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    opt.step()
    if step % 5 == 0 and dist.get_rank() == 0:
        print(f"step {step} | loss {loss.item():.6f} | lr 1e-3", flush=True)
dist.destroy_process_group()
