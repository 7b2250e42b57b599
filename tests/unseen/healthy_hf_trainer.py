"""HF Trainer with evaluation and checkpoints.

class: healthy
kind: healthy
ranks: 2
needs: transformers
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 200

    def __getitem__(self, i: int) -> dict:
        ids = (torch.arange(12) + i) % 60
        return {"input_ids": ids, "labels": ids}


model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2))
args = TrainingArguments(
    tempfile.mkdtemp(),
    max_steps=40,
    per_device_train_batch_size=4,
    use_cpu=True,
    logging_steps=5,
    eval_strategy="steps",
    eval_steps=20,
    save_steps=20,
    report_to=[],
)
Trainer(model, args, train_dataset=Rows(), eval_dataset=Rows()).train()
