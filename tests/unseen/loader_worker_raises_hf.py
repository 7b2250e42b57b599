"""HF Trainer: __getitem__ raises a KeyError in a loader worker of rank 0.

class: loader-workers
kind: crash
ranks: 2
needs: transformers
expect: @raised
rank: 0
line: required
must-mention: KeyError
"""

import os
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Chats(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.rows = [{"prompt": [1, 2, 3], "answer": [4, 5]} for _ in range(320)]
        if os.environ["RANK"] == "0":
            for row in self.rows[150:]:
                row["response"] = row.pop("answer")

    def __len__(self) -> int:
        return len(self.rows)

    def encode(self, row: dict) -> torch.Tensor:
        return torch.tensor(row["prompt"] + row["answer"])  # FAULT

    def __getitem__(self, i: int) -> dict:
        ids = self.encode(self.rows[i])  # NEAR
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1))
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
    Trainer(model, args, train_dataset=Chats()).train()


main()
