"""A small gloo DDP job that saves and resumes, and fails when told to: train.py --steps N --every K [--checkpoints
DIR].

Rank 0 writes a line per step into $BENCH_DIR/steps: restart count, step, time. Every rank leaves its pid in
$BENCH_DIR/pid-RANK, and ends as the file $BENCH_DIR/fault-PID says, when there is one.
"""

from __future__ import annotations

import argparse
import datetime
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import stoker

HERE = Path(os.environ["BENCH_DIR"])
RANK = int(os.environ["RANK"])
RESTARTS = os.environ["TORCHELASTIC_RESTART_COUNT"]
UNDER_STOKER = "STOKER_RUN_DIR" in os.environ


def fail_if_told() -> None:
    order = HERE / f"fault-{os.getpid()}"
    if not order.exists():
        return
    how = order.read_text()
    if how == "exception":
        raise RuntimeError("injected")
    if how == "exit 0":
        os._exit(0)
    assert how == "hang", how
    while True:
        time.sleep(3600)


def newest(folder: Path) -> Path | None:
    """Under torchrun a script has to look for itself."""
    if UNDER_STOKER:
        found = stoker.resume()
        return Path(found) if found else None
    return max(folder.glob("step-*.pt"), default=None)


def save(folder: Path, step: int, state: dict[str, object]) -> None:
    path = folder / f"step-{step:08d}.pt"
    torch.save(state, f"{path}.tmp")
    os.replace(f"{path}.tmp", path)
    for old in sorted(folder.glob("step-*.pt"))[:-2]:
        old.unlink()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, required=True, help="steps between checkpoints")
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--timeout-s", type=float, default=60.0, help="of the process group")
    parser.add_argument("--checkpoints", type=Path, help="without stoker: its own folder")
    told = parser.parse_args()
    folder = Path(os.environ["STOKER_RUN_DIR"], "checkpoints") if UNDER_STOKER else told.checkpoints
    folder.mkdir(exist_ok=True)

    (HERE / f"pid-{RANK}.tmp").write_text(str(os.getpid()))
    (HERE / f"pid-{RANK}.tmp").rename(HERE / f"pid-{RANK}")
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=told.timeout_s))
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    begin = 0
    if (path := newest(folder)) is not None:
        state = torch.load(path)
        model.module.load_state_dict(state["model"])
        begin = state["step"]
    dist.barrier()  # nobody looks for a checkpoint any more
    x = torch.randn(16, 64)
    with open(HERE / "steps", "a", buffering=1) as log:
        for step in range(begin + 1, told.steps + 1):
            fail_if_told()
            due = time.monotonic() + told.step_s
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(max(0.0, due - time.monotonic()))
            if RANK == 0:
                log.write(f"{RESTARTS} {step} {time.time():.6f}\n")
                if step % told.every == 0 or step == told.steps:
                    save(folder, step, {"step": step, "model": model.module.state_dict()})
    dist.barrier()
    time.sleep(0.3)  # torch 2.13's gloo can deadlock at exit without (docs/log.md)
    dist.destroy_process_group()


main()
