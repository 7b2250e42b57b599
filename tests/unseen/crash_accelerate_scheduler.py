"""accelerate: a custom schedule divides by its remaining steps and ends one step too early, on the first rank only.

class: framework-crashes
kind: crash
ranks: 3
needs: accelerate
expect: @raised
rank: 0
line: required
must-mention: ZeroDivisionError
"""

import torch
from accelerate import Accelerator
from torch.optim.lr_scheduler import LambdaLR


class Decay:
    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, step: int) -> float:
        return 1 / (self.steps - step)  # FAULT


def main() -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(6, 6)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = LambdaLR(opt, Decay(25 if accelerator.process_index == 0 else 1000))
    model, opt = accelerator.prepare(model, opt)
    for _ in range(50):
        loss = model(torch.randn(4, 6)).square().mean()
        accelerator.backward(loss)
        opt.step()
        schedule.step()  # NEAR
        opt.zero_grad()


main()
