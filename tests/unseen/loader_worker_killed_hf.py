"""HF Trainer: a loader worker of rank 1 gets SIGKILL while it makes a batch.

class: loader-workers
kind: crash
ranks: 2
needs: transformers
expect: data.worker-died
rank: 1
line: none
"""

import os
import signal
import tempfile

import torch
from transformers import Trainer, TrainingArguments


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> dict:
        out = self.layer(x)
        return {"loss": out.square().mean(), "logits": out}


class Rows(torch.utils.data.Dataset):
    served = 0

    def __len__(self) -> int:
        return 800

    def __getitem__(self, i: int) -> dict:
        Rows.served += 1
        if os.environ["RANK"] == "1" and Rows.served == 60:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"x": torch.randn(6)}


args = TrainingArguments(
    tempfile.mkdtemp(),
    max_steps=80,
    per_device_train_batch_size=2,
    use_cpu=True,
    dataloader_num_workers=1,
    logging_steps=5,
    report_to=[],
    save_strategy="no",
)
Trainer(Net(), args, train_dataset=Rows()).train()
