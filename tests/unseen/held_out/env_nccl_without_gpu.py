"""The backend is set to nccl, but there is no GPU (or torch is built without CUDA): all ranks raise at the start.

class: environment
kind: crash
ranks: 2
expect: env.*, gpu.*, nccl.*, launch.*, @raised
rank: any
line: required
must-mention: NCCL
"""

import argparse
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--learning-rate", type=float, default=0.01)
    return parser.parse_args()


def set_up(backend: str) -> torch.device:
    dist.init_process_group(backend, timeout=timedelta(minutes=10))  # FAULT
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        return torch.device("cuda")
    return torch.device("cpu")


def main() -> None:
    arguments = parse_arguments()
    device = set_up(arguments.backend)  # NEAR
    model = DDP(torch.nn.Linear(8, 8).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.learning_rate)
    for step in range(arguments.steps):
        time.sleep(0.05)
        loss = model(torch.randn(4, 8, device=device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


main()
