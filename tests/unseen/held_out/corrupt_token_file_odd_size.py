"""nanoGPT's token file: the copy on one rank's node was cut off in the middle of a 16-bit token, and np.memmap refuses it.

class: corrupt-files
kind: crash
ranks: 3
expect: data.corrupt, @raised
rank: 2
line: required
"""

import os
import tempfile
import time

import numpy as np
import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

init_process_group(backend="gloo")
ddp_rank = int(os.environ["RANK"])
data_dir = tempfile.mkdtemp(prefix=f"node{ddp_rank}-")
block_size, batch_size, vocab_size = 16, 4, 50
torch.manual_seed(1337 + ddp_rank)

for split in ("train", "val"):
    np.random.randint(0, vocab_size, 5000).astype(np.uint16).tofile(os.path.join(data_dir, f"{split}.bin"))
if ddp_rank == 2:
    os.truncate(os.path.join(data_dir, "val.bin"), 6001)


def get_batch(split: str) -> tuple[torch.Tensor, torch.Tensor]:
    data = np.memmap(os.path.join(data_dir, f"{split}.bin"), dtype=np.uint16, mode="r")  # FAULT
    ix = torch.randint(len(data) - block_size - 1, (batch_size,)).tolist()
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    return x, y


model = DDP(torch.nn.Sequential(torch.nn.Embedding(vocab_size, 16), torch.nn.Linear(16, vocab_size)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss_on(split: str) -> torch.Tensor:
    x, y = get_batch(split)  # NEAR
    return torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


for iter_num in range(80):
    time.sleep(0.05)
    if iter_num and iter_num % 20 == 0:
        with torch.no_grad():
            val_loss = sum(loss_on("val").item() for _ in range(5)) / 5  # NEAR
        if ddp_rank == 0:
            print(f"step {iter_num}: val loss {val_loss:.4f}", flush=True)
    loss = loss_on("train")
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if ddp_rank == 0 and iter_num % 10 == 0:
        print(f"iter {iter_num}: loss {loss.item():.4f}", flush=True)
destroy_process_group()
