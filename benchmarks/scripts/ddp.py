"""A gloo DDP job of a small model: ddp.py STEPS [HOW]. With HOW, rank 1 leaves that way after the last of its STEPS."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

WARM = 20  # the first steps build DDP's buckets
FOREVER = 10**9


def leave(how: str) -> None:
    Path(os.environ["BENCH_DIR"], "died").write_text(str(time.monotonic()))
    if how == "exit3":
        sys.exit(3)
    if how == "exit0":
        os._exit(0)
    os.kill(os.getpid(), {"sigkill": signal.SIGKILL, "sigsegv": signal.SIGSEGV}[how])


def main() -> None:
    steps, how = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(32, 256)
    begun = 0.0
    for step in range(FOREVER if how and rank != 1 else steps):
        if step == WARM:
            dist.barrier()
            begun = time.perf_counter()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if how:
        leave(how)
    if rank == 0 and steps > WARM:
        rate = (steps - WARM) / (time.perf_counter() - begun)
        Path(os.environ["BENCH_DIR"], "rate.json").write_text(json.dumps(rate))
    dist.destroy_process_group()


main()
