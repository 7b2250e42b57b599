"""HF Trainer: a callback waits at a barrier on the main process only.

class: common-path
kind: hang
ranks: 2
needs: transformers
expect: @diverged
rank: 0
line: required
"""

import tempfile

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 400

    def __getitem__(self, i: int) -> dict:
        ids = (torch.arange(12) + i) % 60
        return {"input_ids": ids, "labels": ids}


class SampleText(TrainerCallback):
    def write(self, state) -> None:
        print(f"samples of step {state.global_step} are written", flush=True)
        dist.barrier()  # FAULT

    def on_step_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero and state.global_step % 10 == 0:
            self.write(state)  # NEAR


def main() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    args = TrainingArguments(
        tempfile.mkdtemp(),
        max_steps=60,
        per_device_train_batch_size=4,
        use_cpu=True,
        logging_steps=5,
        report_to=[],
        save_strategy="no",
    )
    Trainer(model, args, train_dataset=Rows(), callbacks=[SampleText()]).train()


main()
