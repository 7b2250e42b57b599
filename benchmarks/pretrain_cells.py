"""One cell of benchmarks/pretrain.py: a process that trains one peer at one size. Started by it, with a JSON argument."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from pretrain_prepare import CUDA, SEED, hand_over
from pretrain_score import SIZES, Size
from torch import Tensor

LEARNING_RATE, BETAS, DECAY, CLIP = (
    1e-4,
    (0.9, 0.95),
    0.1,
    1.0,
)  # at 3e-4 without warm-up S spikes at step 18, and any two runs part there
WORKERS = 4


@dataclasses.dataclass(frozen=True)
class Cell:
    size: Size
    steps: int
    compile: bool
    weights: str
    data: str
    work: Path
    marks: Marks
    losses: list[Tensor]  # on the device: of each micro-batch, as much of its step's loss as it makes


class Marks:
    """When steps end. The first is waited for; of the others the GPU keeps the time, and nobody waits."""

    def __init__(self, started: float) -> None:
        self._started, self._ends = started, list[Any]()
        self.first_s = 0.0

    def step_ends(self) -> None:
        if CUDA:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._ends.append(event)
        else:
            self._ends.append(time.perf_counter())
        if len(self._ends) == 1:
            if CUDA:
                torch.cuda.synchronize()
            self.first_s = time.time() - self._started

    def seconds(self) -> list[float]:
        """Of the second step and each later one."""
        if not CUDA:
            return [after - before for before, after in zip(self._ends[:-1], self._ends[1:], strict=True)]
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in zip(self._ends[:-1], self._ends[1:], strict=True)]


# What all of them get


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The samples in the order in which Stoker takes them."""

    def __init__(self, cell: Cell) -> None:
        from stoker.training.data.order import Order
        from stoker.training.data.reader import Samples

        self._samples = Samples(cell.data, "train", cell.size.context)
        self._ids = Order(len(self._samples), SEED).ids(0, len(self._samples))

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        batch = self._samples.batch(self._ids[place : place + 1])
        targets = torch.from_numpy(batch.targets[0])
        # `shift_labels` are the targets as they are: transformers would shift `labels` itself and leave the last
        # position without one.
        return {"input_ids": torch.from_numpy(batch.inputs[0]), "labels": targets, "shift_labels": targets}


def transformers_model(cell: Cell) -> Any:
    from transformers import AutoModelForCausalLM

    more = {"experts_implementation": "grouped_mm"} if cell.size.experts else {}
    return AutoModelForCausalLM.from_pretrained(cell.weights, dtype=torch.float32, **more).train()


def adamw(model: Any) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=1e-8, fused=True)


def loader(cell: Cell) -> Any:
    return torch.utils.data.DataLoader(Rows(cell), batch_size=cell.size.micro, num_workers=WORKERS, pin_memory=CUDA)


# The peers: each trains cell.steps steps, marks their ends and leaves cell.losses


def stoker(cell: Cell, fp8: bool = False) -> None:
    """The recipe itself; its data is there already, and its stepper also marks."""
    from stoker.training.data.shards import open_prepared
    from stoker.training.loop.step import Pending, Stepper
    from stoker.training.recipes import pretrain as recipe
    from stoker.training.recipes import supervised

    class Marked(Stepper):
        def step(self, *args: Any, **more: Any) -> Pending:
            pending = super().step(*args, **more)
            cell.marks.step_ends()
            return pending

    size = cell.size
    keys = {
        "model.load": cell.weights,
        "tokenizer.path": "bytes",
        "data.path": cell.data,
        "data.cache": str(cell.work / "cache"),
        "data.validation": "0",
        "data.context_length": size.context,
        "data.seed": SEED,
        "batch.tokens": size.step_tokens,
        "batch.micro": size.micro,
        "optim.learning_rate": LEARNING_RATE,
        "optim.schedule": "constant",
        "optim.warmup_steps": 0,
        "optim.warmup_ratio": 0,
        "optim.beta1": BETAS[0],
        "optim.beta2": BETAS[1],
        "optim.eps": 1e-8,
        "optim.weight_decay": DECAY,
        "optim.max_grad_norm": CLIP,
        "compute.dtype": "bf16",
        "compute.fp8": "tensorwise" if fp8 else "off",
        "compute.compile": "auto" if cell.compile else "off",
        "train.max_steps": cell.steps,
        "train.log_every": 1,
        "train.eval_every": 0,
        "checkpoint.every": 0,
        "checkpoint.at_end": "false",
        "checkpoint.export": "false",
        "checkpoint.resume": "never",
    }
    words = ["--preset", "production", *(f"--{name}={value}" for name, value in keys.items())]
    with (
        patch.object(recipe, "prepare", lambda *_: open_prepared(cell.data)),
        patch.object(supervised, "Stepper", Marked),
    ):
        code = recipe.main(words)
    if code:
        raise SystemExit(code)
    lines = (Path(os.environ["STOKER_RUN_DIR"]) / "metrics.jsonl").read_text().splitlines()
    cell.losses.extend(torch.tensor(json.loads(line)["loss"], dtype=torch.float64) for line in lines)


def hf(cell: Cell, tuned: bool = False) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    size = cell.size

    class Mark(TrainerCallback):
        def on_step_end(self, *args: Any, **more: Any) -> None:
            cell.marks.step_ends()

    # Some versions count labels[1:], whoever gives shift_labels: this count is the true one.
    targets = torch.tensor(size.step_tokens, device="cuda" if CUDA else "cpu")

    class InOrder(Trainer):
        def _get_train_sampler(self, *args: Any, **more: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            loss = super().training_step(model, inputs, targets)
            cell.losses.append(loss)
            return loss

    more: dict[str, Any] = {}
    if tuned:
        more = {
            "torch_compile": cell.compile,
            "dataloader_num_workers": WORKERS,
            "dataloader_pin_memory": True,
            "logging_steps": 1000,
            "logging_nan_inf_filter": False,
        }
    arguments = TrainingArguments(
        output_dir=str(cell.work / "hf"),
        per_device_train_batch_size=size.micro,
        gradient_accumulation_steps=size.accumulation,
        max_steps=cell.steps,
        bf16=True,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=DECAY,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_epsilon=1e-8,
        max_grad_norm=CLIP,
        seed=SEED,
        remove_unused_columns=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=not CUDA,
        **more,
    )
    InOrder(model=transformers_model(cell), args=arguments, train_dataset=Rows(cell), callbacks=[Mark()]).train()


def lightning(cell: Cell) -> None:
    import lightning

    accumulation = cell.size.accumulation
    model = transformers_model(cell)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.compile(model) if cell.compile else model

        def training_step(self, batch: dict[str, Tensor], place: int) -> Tensor:
            loss: Tensor = self.inner(**batch, use_cache=False).loss
            cell.losses.append(loss.detach() / accumulation)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(model)

        def configure_gradient_clipping(self, *args: Any, **more: Any) -> None:
            torch.nn.utils.clip_grad_norm_(
                model.parameters(), CLIP
            )  # Lightning's own refuses fused optimizers under mixed precision

        def on_train_batch_end(self, outputs: Any, batch: Any, place: int) -> None:
            if (place + 1) % accumulation == 0:
                cell.marks.step_ends()

    trainer = lightning.Trainer(
        max_steps=cell.steps,
        accumulate_grad_batches=accumulation,
        precision="bf16-mixed",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(cell.work),
    )
    trainer.fit(Module(), loader(cell))


def loop(cell: Cell) -> None:
    device = torch.device("cuda" if CUDA else "cpu")
    accumulation = cell.size.accumulation
    model = transformers_model(cell).to(device)
    called = torch.compile(model) if cell.compile else model
    optimizer = adamw(model)
    batches = iter(loader(cell))
    for _ in range(cell.steps):
        for _ in range(accumulation):
            batch = {name: tensor.to(device, non_blocking=True) for name, tensor in next(batches).items()}
            with torch.autocast(device.type, torch.bfloat16):
                loss = called(**batch, use_cache=False).loss / accumulation
            loss.backward()
            cell.losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        cell.marks.step_ends()


TRAIN: dict[str, Callable[[Cell], None]] = {
    "stoker": stoker, "stoker-fp8": lambda cell: stoker(cell, fp8=True), "hf": hf, "hf-tuned": lambda cell: hf(cell, tuned=True), "lightning": lightning,
    "loop": loop,
}  # fmt: skip


def train(told: dict[str, Any]) -> dict[str, Any]:
    torch.set_float32_matmul_precision("high")
    shared = Path(told["folder"]) / told["size"]
    compiled = CUDA if told["compile"] == "auto" else told["compile"] == "on"
    cell = Cell(
        SIZES[told["size"]],
        told["steps"],
        compiled,
        str(shared / "weights"),
        str(shared / "data"),
        Path(told["work"]),
        Marks(told["started"]),
        [],
    )
    TRAIN[told["peer"]](cell)
    seconds = cell.marks.seconds()
    losses = torch.stack([one.double().cpu() for one in cell.losses]).view(cell.steps, -1).sum(1).tolist()
    return {
        "first_s": round(cell.marks.first_s, 2),
        "step_s": [round(one, 5) for one in seconds],
        "losses": [round(one, 5) for one in losses],
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if CUDA else None,
    }


if __name__ == "__main__":
    TOLD = json.loads(sys.argv[1])
    hand_over(train(TOLD), TOLD)
