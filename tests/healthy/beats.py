"""Says its steps itself, with a loss that jumps about and is large now and then, as early training's is; with an optimizer torch knows nothing of."""

import random
import time

import torch.distributed as dist
from training import arguments, busy, finish

import stoker

told = arguments(seconds=6.0, steps=200)
dist.init_process_group("gloo")
draw = random.Random(told.seed)
for step in range(told.steps):
    time.sleep(0.05)
    stoker.beat(step=step, loss=11.0 / (1 + step / 50) * draw.uniform(0.5, 3.0), tokens=4096)
    if step == told.steps // 2:
        busy(told.seconds)
        dist.barrier()
finish()
