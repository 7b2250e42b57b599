"""Gradient accumulation: many micro-batches for each step, and the beat comes with the step only."""

import time

from training import RANK, Tiny, arguments, finish

told = arguments(micro=0.1, accumulation=40, steps=8)
tiny = Tiny()
for step in range(told.steps):
    with tiny.model.no_sync():
        for _ in range(told.accumulation - 1):
            tiny.model(tiny.batch).square().mean().backward()
            time.sleep(told.micro)
    loss = tiny.step(told.micro, speaks=False)
    if RANK == 0:
        print(f"step {step} | loss {loss:.4f}")
finish()
