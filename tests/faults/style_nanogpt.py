"""nanoGPT's loop with one of the mistakes of mistakes.py. `python style_nanogpt.py MISTAKE GUILTY`"""

import os
import time
from contextlib import nullcontext

import torch
from mistakes import STEPS, WIDTH, Samples, at_step, guilty, length
from moment import fault
from torch.distributed import barrier, destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

gradient_accumulation_steps = 2
log_interval = 1
ddp = "RANK" in os.environ
torch.set_num_threads(1)
init_process_group(backend="gloo")
ddp_rank = int(os.environ["RANK"])
master_process = ddp_rank == 0
torch.manual_seed(1337 + ddp_rank)
data = Samples(STEPS)
ctx = nullcontext()


def get_batch(split: str, number: int) -> torch.Tensor:
    return data[number]


class GPT(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = torch.nn.Linear(WIDTH, WIDTH)
        self.lm_head = torch.nn.Linear(WIDTH, 1)

    def forward(self, idx: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.lm_head(self.wte(idx).relu())  # line: shape
        return logits, logits.square().mean()


model = DDP(GPT())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
iter_num = 0
t0 = time.time()
X = get_batch("train", 0)
while True:
    at_step(iter_num)
    for micro_step in range(gradient_accumulation_steps):
        model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with ctx:
            logits, loss = model(X)
            loss = loss / gradient_accumulation_steps
        X = get_batch("train", min(iter_num + 1, STEPS - 1)) if micro_step else X
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    dt, t0 = time.time() - t0, time.time()
    if iter_num % log_interval == 0 and master_process:
        lossf = loss.item() * gradient_accumulation_steps
        print(f"iter {iter_num}: loss {lossf:.4f}, time {dt * 1000:.2f}ms, mfu {-100.0:.2f}%", flush=True)
    iter_num += 1
    if iter_num > length() - 1:
        break
if guilty():
    fault()
barrier()  # line: fewer-batches
time.sleep(0.3)
destroy_process_group()
