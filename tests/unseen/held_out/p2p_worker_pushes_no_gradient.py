"""A parameter server on rank 0: a worker pushes no gradient for a step that it found invalid, and validates at once.

class: point-to-point
kind: hang
ranks: 4
expect: @diverged, @hang
rank: 2
line: required
"""

import time

import torch
import torch.distributed as dist

SIZE = 30


def server(steps: int) -> None:
    parameters, gradient = torch.ones(SIZE), torch.empty(SIZE)
    for step in range(steps):
        for worker in range(1, dist.get_world_size()):
            dist.send(parameters, dst=worker)
        for worker in range(1, dist.get_world_size()):
            dist.recv(gradient, src=worker)  # NEAR
            parameters -= 0.01 * gradient
        if step % 5 == 0:
            print(f"step {step} norm {parameters.norm().item():.4f}", flush=True)
    dist.barrier()


def validate(group: dist.ProcessGroup) -> float:
    score = torch.rand(1)
    dist.all_reduce(score, group=group)  # FAULT
    return score.item()


def worker(steps: int, rank: int, group: dist.ProcessGroup) -> None:
    parameters = torch.empty(SIZE)
    for step in range(steps):
        dist.recv(parameters, src=0)
        time.sleep(0.1)
        x = torch.randn(SIZE)
        error = (parameters * x).sum() - x.sum() * 0.5
        if rank == 2 and step == 21:
            error = error * float("inf")  # an overflow of this worker
        if not torch.isfinite(error):
            print(f"rank {rank}: step {step} is invalid, score {validate(group):.3f}", flush=True)  # NEAR
            continue
        dist.send(2 * error * x, dst=0)
        if step % 40 == 39:
            validate(group)
    dist.barrier()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    group = dist.new_group([1, 2, 3])
    if rank == 0:
        server(120)
    else:
        worker(120, rank, group)


main()
