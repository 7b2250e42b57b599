"""A loop with accelerate with one of the mistakes of mistakes.py. `python style_accelerate.py MISTAKE GUILTY`"""

import time

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from mistakes import WIDTH, WORKERS, Samples, at_step, guilty, length
from moment import RANK, fault
from torch.utils.data import DataLoader


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.second = torch.nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())  # line: shape


def training_function() -> None:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    set_seed(42)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    # Each rank makes its own batches: a prepared loader would send them out from rank 0.
    loader = DataLoader(Samples(length()), batch_size=None, num_workers=WORKERS, prefetch_factor=1 if WORKERS else None)
    for step, batch in enumerate(loader):
        at_step(step)
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        mean = accelerator.gather(loss.detach()).mean()
        accelerator.print(f"epoch 0: step {step}: {{'train_loss': {mean.item():.4f}, 'lr': 0.001}}", flush=True)
    if guilty():
        fault()
    accelerator.wait_for_everyone()  # line: fewer-batches
    time.sleep(0.3)
    accelerator.end_training()


if __name__ == "__main__":
    assert RANK >= 0
    training_function()
