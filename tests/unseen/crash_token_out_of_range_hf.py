"""HF Trainer: token ids above the vocabulary on all ranks: IndexError in the embedding.

class: framework-crashes
kind: crash
ranks: 2
needs: transformers
expect: @raised
rank: any
line: required
must-mention: IndexError
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict:
        ids = torch.arange(8) + (60 if i % 8 == 7 else 0)
        return {"input_ids": ids, "labels": ids}


def train(model: torch.nn.Module) -> None:
    args = TrainingArguments(
        tempfile.mkdtemp(),
        max_steps=30,
        per_device_train_batch_size=8,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_steps=5,
    )
    Trainer(model, args, train_dataset=Rows()).train()  # FAULT


if __name__ == "__main__":
    train(GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2)))  # NEAR
