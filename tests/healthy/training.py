"""What the healthy scripts share: their arguments, a small DDP job, and an end that torch 2.13's gloo survives."""

from __future__ import annotations

import argparse
import gc
import os
import random
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])
STEP_S = 0.05


def arguments(**defaults: float | str) -> argparse.Namespace:
    """A flag for each default, and --seed and --scale. A number with a fraction is seconds: times the scale, times 0.8 to 1 by the seed.

    The scale makes fewer `steps` too, but not fewer than 20.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0)
    for name, default in defaults.items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(default), default=default)
    told = parser.parse_args()
    draw = random.Random(told.seed)  # the same on all ranks
    for name, default in defaults.items():
        if isinstance(default, float):
            setattr(told, name, getattr(told, name) * told.scale * draw.uniform(0.8, 1.0))
        elif name == "steps":
            told.steps = max(min(20, told.steps), int(told.steps * told.scale))
    torch.manual_seed(told.seed)
    return told


class Tiny:
    """A small model under DDP."""

    def __init__(self, width: int = 64) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self.model = DistributedDataParallel(
            torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width))
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.batch = torch.randn(16, width)
        self.steps = 0
        gc.freeze()  # Python looks for garbage when it ends: among all that torch is made of, a second of CPU time

    def step(self, seconds: float = STEP_S, speaks: bool = True) -> float:
        loss = self.model(self.batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        time.sleep(seconds)
        self.steps += 1
        if speaks and self.steps % 10 == 0:
            print(f"[rank {RANK}] step {self.steps} loss: {loss.item():.4f}")
        return float(loss.item())

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step()


def busy(seconds: float) -> None:
    """Computes, letting go of the GIL now and then as torch does."""
    end = time.monotonic() + seconds
    x = torch.randn(128, 128)
    while time.monotonic() < end:
        x = torch.tanh(x @ x)


def spend(seconds: float, how: str) -> None:
    """`how`: "busy" computes, "sleep" waits for a disk or a network."""
    if how == "busy":
        busy(seconds)
    else:
        time.sleep(seconds)


def phase(name: str, marked: str) -> None:
    """Says it to stoker where the script is one that does; the others don't even import it."""
    if marked == "yes":
        import stoker

        stoker.phase(name)


def finish() -> None:
    dist.barrier()
    time.sleep(0.3)  # gloo's threads let go of their tensors: torch 2.13 can deadlock otherwise (docs/log.md)
    dist.destroy_process_group()
