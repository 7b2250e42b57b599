"""HF Trainer: a callback ends the training when the time budget is used up, and asks only the clock of its own rank.

class: common-path
kind: hang
ranks: 3
needs: transformers
expect: @diverged
rank: 2
line: required
"""

import tempfile
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments


class TimeBudget(TrainerCallback):
    def __init__(self, seconds: float) -> None:
        self.deadline = time.monotonic() + seconds
        self.steps = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1
        time.sleep(0.08)
        if self.steps > 5 and time.monotonic() > self.deadline:
            control.should_training_stop = True  # FAULT


class Tokens(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 3000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 100, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    args = TrainingArguments(
        tempfile.mkdtemp(),
        max_steps=400,
        per_device_train_batch_size=2,
        use_cpu=True,
        logging_steps=5,
        report_to=[],
        save_strategy="no",
    )
    loading = 56.0 if args.process_index == 2 else 0.0  # the disk of this rank is slow
    budget = TimeBudget(60.0 - loading)
    trainer = Trainer(LlamaForCausalLM(config), args, train_dataset=Tokens(), callbacks=[budget])
    trainer.train()  # NEAR
    trainer.save_model()


main()
