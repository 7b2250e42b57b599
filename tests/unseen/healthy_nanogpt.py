"""nanoGPT's loop: accumulation without sync, estimate_loss() on the master process only, checkpoints.

class: healthy
kind: healthy
ranks: 2
"""

import math
import os
import tempfile
import time

import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

init_process_group(backend="gloo")
ddp_rank = int(os.environ["RANK"])
master_process = ddp_rank == 0
torch.manual_seed(1337 + ddp_rank)
raw = torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50))
model = DDP(raw)
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95))
data = torch.randint(0, 50, (4000,))


def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
    ix = torch.randint(len(data) - 17, (4,)).tolist()
    return torch.stack([data[i : i + 16] for i in ix]), torch.stack([data[i + 1 : i + 17] for i in ix])


def loss_of(net: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(net(x).flatten(0, 1), y.flatten())


@torch.no_grad()
def estimate_loss() -> float:
    raw.eval()
    losses = []
    for _ in range(200):
        losses.append(loss_of(raw, *get_batch()).item())
        time.sleep(0.005)
    raw.train()
    return sum(losses) / len(losses)


t0 = time.time()
for iter_num in range(100):
    for group in optimizer.param_groups:
        group["lr"] = 6e-4 * 0.5 * (1 + math.cos(math.pi * iter_num / 100))
    if iter_num % 40 == 0 and master_process:
        print(f"step {iter_num}: val loss {estimate_loss():.4f}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            torch.save({"model": raw.state_dict(), "iter_num": iter_num}, os.path.join(folder, "ckpt.pt"))
    for micro_step in range(4):
        model.require_backward_grad_sync = micro_step == 3
        loss = loss_of(model, *get_batch()) / 4
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if iter_num % 10 == 0 and master_process:
        print(f"iter {iter_num}: loss {loss.item() * 4:.4f}, time {(time.time() - t0) * 1000:.2f}ms", flush=True)
    t0 = time.time()
destroy_process_group()
