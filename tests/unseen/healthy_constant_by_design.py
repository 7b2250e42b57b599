"""Inference over shards with a constant number printed, no optimizer; ranks have different amounts of work and no collectives but a last gather.

class: healthy
kind: healthy
ranks: 3
"""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Linear(8, 8).eval()
scores = []
with torch.inference_mode():
    for batch in range(40 + 40 * rank):
        scores.append(model(torch.randn(4, 8)).mean().item())
        time.sleep(0.08)
        if batch % 20 == 0:
            print(f"rank {rank} batch {batch} temperature 0.7", flush=True)
everyone: list = [None] * dist.get_world_size()
dist.all_gather_object(everyone, len(scores))
if rank == 0:
    print("samples", sum(everyone), flush=True)
dist.destroy_process_group()
