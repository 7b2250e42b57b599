"""HF Trainer: a callback waits for a scoring script without reading its output, which fills the pipe.

class: inside-a-rank
kind: hang
ranks: 3
needs: transformers
expect: @hang, hang.child
rank: 2
line: required
"""

import subprocess
import sys
import tempfile
import time

import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, Trainer, TrainerCallback, TrainingArguments

SCORER = "for row in range(6000): print('row', row, 'score', row % 7 / 7, 'of the benchmark')"


class Benchmark(TrainerCallback):
    """Runs the scorer on the node that has its data."""

    def run(self, step: int) -> int:
        process = subprocess.Popen([sys.executable, "-c", SCORER], stdout=subprocess.PIPE, text=True)
        return process.wait()  # FAULT

    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(0.08)
        if args.process_index == 2 and state.global_step == 20:
            self.run(state.global_step)  # NEAR


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(10) * (index % 7 + 1)) % 50
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    config = GPTNeoXConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    args = TrainingArguments(
        tempfile.mkdtemp(),
        max_steps=200,
        per_device_train_batch_size=2,
        use_cpu=True,
        logging_steps=5,
        report_to=[],
        save_strategy="no",
    )
    Trainer(GPTNeoXForCausalLM(config), args, train_dataset=Rows(), callbacks=[Benchmark()]).train()


main()
