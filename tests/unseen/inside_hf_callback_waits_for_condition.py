"""HF Trainer: a callback waits for a writer thread that has already ended.

class: inside-a-rank
kind: hang
ranks: 2
needs: transformers
expect: @hang
rank: 1
line: required
"""

import tempfile
import threading

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments


class Regression(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict:
        out = self.layer(x).squeeze(-1)
        return {"loss": (out - labels).square().mean(), "logits": out}


class Writer:
    def __init__(self) -> None:
        self.done = threading.Semaphore(0)
        self.pending = 0

    def write(self, fails: bool) -> None:
        def work() -> None:
            if not fails:
                self.done.release()

        threading.Thread(target=work).start()

    def wait(self) -> None:
        self.done.acquire()  # FAULT


class Export(TrainerCallback):
    def __init__(self) -> None:
        self.writer = Writer()

    def on_step_end(self, args, state, control, **kwargs):
        self.writer.write(fails=args.process_index == 1 and state.global_step == 20)
        self.writer.wait()  # NEAR


rows = [{"x": torch.randn(6), "labels": torch.tensor(1.0)} for _ in range(400)]
args = TrainingArguments(
    tempfile.mkdtemp(),
    max_steps=60,
    per_device_train_batch_size=4,
    use_cpu=True,
    logging_steps=5,
    report_to=[],
    save_strategy="no",
)
Trainer(Regression(), args, train_dataset=rows, callbacks=[Export()]).train()
