"""accelerate: a learning rate above the limit of stability: the loss grows by a factor in each step, and stays finite for long.

class: numbers
kind: numbers
outcome: any
ranks: 2
needs: accelerate
expect: nan.exploding, numbers.expl*, loss.expl*, nan.loss
rank: any
line: none
"""

import time

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader


def main() -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    x = torch.randn(4000, 4)
    model = torch.nn.Linear(4, 1)
    loader = DataLoader(list(zip(x, x.sum(-1, keepdim=True), strict=True)), batch_size=8)
    model, opt, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.1), loader)
    for step, (a, b) in enumerate(loader):
        loss = (model(a) - b).square().mean()
        opt.zero_grad()
        accelerator.backward(loss)
        opt.step()
        time.sleep(0.03)
        accelerator.print(f"step={step} train_loss={loss.item():.3e}", flush=True)
        if step == 100:
            break


main()
