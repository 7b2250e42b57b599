"""HF Trainer with a learning rate of 0 on the same full batch: the logged loss is exactly constant; the job completes.

class: numbers
kind: numbers
outcome: completes
ranks: 2
needs: transformers
expect: @flat
rank: any
line: none
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


def settings(steps: int, rate: float) -> TrainingArguments:
    return TrainingArguments(
        tempfile.mkdtemp(),
        max_steps=steps,
        per_device_train_batch_size=4,
        use_cpu=True,
        logging_steps=1,
        learning_rate=rate,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )


def main() -> None:
    torch.manual_seed(0)
    row = torch.arange(8)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
    )
    warmup_only = 0.0  # a schedule that never leaves its warm-up
    Trainer(model, settings(150, warmup_only), train_dataset=[{"input_ids": row, "labels": row}] * 64).train()


main()
