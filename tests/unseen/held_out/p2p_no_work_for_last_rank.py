"""Rank 0 deals out prompts with send_object_list; a round with too few prompts leaves out the last rank, which waits for its part.

class: point-to-point
kind: hang
ranks: 4
expect: @diverged, @hang
rank: 0, 3
line: required
"""

import time

import torch
import torch.distributed as dist


def deal(prompts: list[str], workers: int) -> None:
    share = -(-len(prompts) // workers)
    for worker in range(1, workers + 1):
        part = prompts[(worker - 1) * share : worker * share]
        if part:
            dist.send_object_list([part], dst=worker)  # FAULT


def receive() -> list[str]:
    box: list[list[str] | None] = [None]
    dist.recv_object_list(box, src=0)  # NEAR
    assert box[0] is not None
    return box[0]


def score(prompts: list[str], weights: torch.Tensor) -> torch.Tensor:
    time.sleep(0.1)
    lengths = torch.tensor([float(len(prompt)) for prompt in prompts])
    return (lengths.unsqueeze(1) * weights).mean()


def main() -> None:
    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size() - 1
    weights = torch.ones(4)
    for round_number in range(60):
        if rank == 0:
            count = 4 if round_number == 17 else 12  # most prompts of this round were filtered out
            prompts = [f"question {round_number}.{index}" for index in range(count)]
            deal(prompts, workers)  # NEAR
            value = torch.zeros(())
        else:
            value = score(receive(), weights)  # NEAR
        dist.all_reduce(value)  # NEAR
        weights *= 0.99
        if rank == 0 and round_number % 4 == 0:
            print(f"round {round_number} score {value.item():.3f}", flush=True)


main()
