"""A loop as Hugging Face's Trainer has it: accumulation, scheduler, clipping, dictionaries as log lines, evaluation and saving. Knows nothing of stoker."""

import contextlib
import os
import tempfile
import time

import torch
import torch.distributed as dist
from training import RANK, Tiny, arguments, finish

told = arguments(evaluation=10.0, saving=5.0, accumulation=4, epochs=2, steps=30)
tiny = Tiny()
scheduler = torch.optim.lr_scheduler.LambdaLR(tiny.optimizer, lambda step: 1.0 / (1 + step))
began = time.monotonic()


def log(**values: object) -> None:
    if RANK == 0:
        print({key: str(value) for key, value in values.items()})


for epoch in range(told.epochs):
    for step in range(told.steps):
        total = 0.0
        for micro in range(told.accumulation):
            last = micro == told.accumulation - 1
            with contextlib.nullcontext() if last else tiny.model.no_sync():
                loss = tiny.model(tiny.batch).square().mean() / told.accumulation
                loss.backward()
                total += loss.item()
            time.sleep(0.02)
        norm = torch.nn.utils.clip_grad_norm_(tiny.model.parameters(), 1.0)
        tiny.optimizer.step()
        scheduler.step()
        tiny.optimizer.zero_grad()
        if step % 10 == 0:
            log(
                loss=f"{total:.4f}",
                grad_norm=f"{norm.item():.4f}",
                learning_rate=scheduler.get_last_lr()[0],
                epoch=epoch + step / told.steps,
            )
    with torch.no_grad():
        end = time.monotonic() + told.evaluation
        while time.monotonic() < end:
            tiny.model.module(tiny.batch)
            time.sleep(0.05)
    log(eval_loss="0.7000", eval_runtime=f"{told.evaluation:.4f}", epoch=epoch + 1)
    if RANK == 0:
        with tempfile.TemporaryDirectory() as folder:
            torch.save(tiny.model.state_dict(), os.path.join(folder, "model.pt"))
            time.sleep(told.saving)
    dist.barrier()
log(train_runtime=f"{time.monotonic() - began:.4f}", train_loss="0.7000")
finish()
