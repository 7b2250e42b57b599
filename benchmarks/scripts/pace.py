"""Steps of 20 ms until BENCH_DIR/stop is there, or for SECONDS at most: pace.py SECONDS quiet|talk. One line per step
if it talks.
"""

import os
import sys
import time
from pathlib import Path

import torch

STEP_S = 0.02
here = Path(os.environ["BENCH_DIR"])
talk = sys.argv[2] == "talk"
weight = torch.nn.Parameter(torch.ones(1))
weight.grad = torch.ones(1)
optimizer = torch.optim.SGD([weight], lr=1e-6)
begun = time.monotonic()
step = 0
while time.monotonic() < begun + float(sys.argv[1]) and not (here / "stop").exists():
    time.sleep(max(0.0, begun + step * STEP_S - time.monotonic()))
    optimizer.step()
    step += 1
    if talk:
        print(
            f"step {step} loss {weight.item():.6f} lr 1.0e-06 tokens 262144 some more words such as a training log has",
            flush=True,
        )
    if step == 1:
        (here / f"up-{os.environ['RANK']}").touch()
