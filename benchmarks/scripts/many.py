"""A rank of benchmarks/many_ranks.py, until $BENCH_DIR/stop is there: many.py torch|plain STEP_S.

Says at once that it is there. torch: gloo DDP, a checkpoint every 5 steps. plain: a step, a beat and a line of output, without torch.
Every rank leaves the time of each beat in $BENCH_DIR/beats-ATTEMPT-RANK; rank 0 writes a line per step into $BENCH_DIR/steps.
"""

from __future__ import annotations

import os
import struct
import sys
import time
from pathlib import Path

import stoker

HERE = Path(os.environ["BENCH_DIR"])
RANK, WORLD, ATTEMPT = int(os.environ["RANK"]), os.environ["WORLD_SIZE"], os.environ["TORCHELASTIC_RESTART_COUNT"]
STEP_S = float(sys.argv[2])
EVERY = 5

print(f"HELLO {time.monotonic()}", flush=True)
beats = open(HERE / f"beats-{ATTEMPT}-{RANK}", "ab", buffering=0)  # noqa: SIM115  until the process ends
steps = open(HERE / "steps", "a", buffering=1)  # noqa: SIM115


def stepped(step: int) -> None:
    beats.write(struct.pack("<qd", step, time.time()))
    stoker.beat(step=step)
    if RANK == 0:
        steps.write(f"{ATTEMPT} {step} {time.time():.6f}\n")


def plain() -> None:
    begun, step = time.monotonic(), 0
    while not (HERE / "stop").exists():
        step += 1
        time.sleep(max(0.0, begun + step * STEP_S - time.monotonic()))
        stepped(step)
        print(f"step {step} loss 1.234567 lr 1.0e-06 some more words such as a training log has", flush=True)


def with_torch() -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = Path(os.environ["STOKER_RUN_DIR"], "checkpoints")
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)))
    step = 0
    if found := stoker.resume():
        state = torch.load(found)
        model.module.load_state_dict(state["model"])
        step = state["step"]
    dist.barrier()  # nobody looks for a checkpoint any more
    x, enough = torch.randn(16, 64), torch.zeros(1)
    while not enough:
        due, step = time.monotonic() + STEP_S, step + 1
        loss = model(x).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 1e-3 * parameter.grad
                parameter.grad = None
        enough[0] = float(RANK == 0 and (HERE / "stop").exists())
        dist.all_reduce(enough)
        time.sleep(max(0.0, due - time.monotonic()))
        stepped(step)
        print(f"step {step} of {WORLD} ranks loss {float(loss.detach()):.6f}", flush=True)
        if RANK == 0 and step % EVERY == 0:
            path = folder / f"step-{step:08d}.pt"
            torch.save({"step": step, "model": model.module.state_dict()}, f"{path}.tmp")
            os.replace(f"{path}.tmp", path)
            stoker.mark("CHECKPOINT")  # a host that is back may join now
    dist.barrier()
    os._exit(0)  # torch 2.13 can abort in its own shutdown of gloo, with no launcher at all


{"torch": with_torch, "plain": plain}[sys.argv[1]]()
