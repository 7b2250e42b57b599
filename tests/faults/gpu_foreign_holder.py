"""Somebody else takes most of the card while the job runs (at the line READY: around.py hold), and the next allocation fails."""

import time

import torch
from moment import fault, guilty
from training import steps_on_gpu

for step in steps_on_gpu():
    if guilty(step, rank=0):
        print("READY", flush=True)
        deadline = time.monotonic() + 60
        free, total = torch.cuda.mem_get_info()
        while free > 0.3 * total:
            if time.monotonic() > deadline:
                raise TimeoutError("nobody took the card: to be started by around.py hold")
            time.sleep(0.1)
            free, total = torch.cuda.mem_get_info()
        fault()
        torch.empty(int(0.5 * total), dtype=torch.uint8, device="cuda")
