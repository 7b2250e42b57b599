"""HF Trainer: a callback asserts something about the learning rate, and fails on the last rank.

class: framework-crashes
kind: crash
ranks: 2
needs: transformers
expect: @raised
rank: 1
line: required
must-mention: AssertionError
"""

import tempfile

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> dict:
        out = self.layer(x)
        return {"loss": out.square().mean(), "logits": out}


class CheckRate(TrainerCallback):
    def __init__(self, lowest: float) -> None:
        self.lowest = lowest

    def check(self, rate: float, step: int) -> None:
        assert rate > self.lowest, f"the learning rate is {rate} at step {step}"  # FAULT

    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        self.check(optimizer.param_groups[0]["lr"], state.global_step)  # NEAR


def main() -> None:
    args = TrainingArguments(
        tempfile.mkdtemp(),
        max_steps=40,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        learning_rate=1e-3,
    )
    lowest = 5e-4 if args.process_index == 1 else 0.0
    Trainer(
        Net(), args, train_dataset=[{"x": torch.randn(6)} for _ in range(200)], callbacks=[CheckRate(lowest - 1e-9)]
    ).train()


main()
