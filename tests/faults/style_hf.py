"""transformers' Trainer with one of the mistakes of mistakes.py. `python style_hf.py MISTAKE GUILTY`"""

import os

import torch
from mistakes import WIDTH, WORKERS, Samples, at_step, length
from transformers import Trainer, TrainerCallback, TrainingArguments


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.second = torch.nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.second(self.first(x).relu())  # line: shape
        return {"loss": logits.square().mean(), "logits": logits}


class Mistake(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        at_step(state.global_step)


class OwnBatches(Trainer):
    """Each rank has its own batches, one per index, made where they are used."""

    def get_train_dataloader(self) -> torch.utils.data.DataLoader:
        return torch.utils.data.DataLoader(
            Samples(length()),
            batch_size=None,
            num_workers=WORKERS,
            prefetch_factor=1 if WORKERS else None,
            collate_fn=lambda batch: {"x": batch},
        )


def main() -> None:
    torch.set_num_threads(1)
    arguments = TrainingArguments(
        output_dir=os.environ.get("FAULTS_DIR", "out"),
        use_cpu=True,
        max_steps=400,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        per_device_train_batch_size=8,
    )
    OwnBatches(Model(), arguments, train_dataset=Samples(), callbacks=[Mistake()]).train()


if __name__ == "__main__":
    main()
