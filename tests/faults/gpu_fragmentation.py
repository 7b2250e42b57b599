"""The card has room and torch holds it in pieces: half of every 2 GiB segment is in use, so none can be given back or joined, and 5 GiB fit nowhere."""

import os

os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:False"

import torch
from moment import fault, guilty
from training import steps_on_gpu

GIB = 2**30


def block(gib: int) -> torch.Tensor:
    return torch.empty(gib * GIB, dtype=torch.uint8, device="cuda")


for step in steps_on_gpu():
    if guilty(step, rank=0):
        # 2 to 4 GiB of the card stay free: less than what is asked for in the end.
        segments = [block(2) for _ in range((torch.cuda.mem_get_info()[0] - 2 * GIB) // (2 * GIB))]
        count = len(segments)
        del segments  # the segments stay reserved; what is asked for next is cut out of them
        halves = [block(1) for _ in range(2 * count)]
        where = sorted(halves, key=lambda one: one.data_ptr())
        kept = where[::2]
        del halves, where
        fault()
        block(5)
