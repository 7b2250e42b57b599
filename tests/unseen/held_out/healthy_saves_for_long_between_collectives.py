"""FSDP2: rank 0 writes the full state to a slow disk for many seconds, the others are in the next step's all-gather by then.

class: healthy
kind: healthy
ranks: 4
"""

import io
import os
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard


def write_slowly(content: bytes, path: str) -> None:
    """Writes as a network disk does that other jobs use, too."""
    piece = -(-len(content) // 20)
    with open(path, "wb") as file:
        for start in range(0, len(content), piece):
            file.write(content[start : start + piece])
            file.flush()
            os.fsync(file.fileno())
            time.sleep(0.4)


def save(model: nn.Module, folder: str, step: int) -> None:
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() != 0:
        return
    buffer = io.BytesIO()
    torch.save({"model": state, "step": step}, buffer)
    write_slowly(buffer.getvalue(), os.path.join(folder, f"step-{step}.pt"))
    print(f"step {step} is saved", flush=True)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    folder = tempfile.mkdtemp()
    for step in range(1, 81):
        time.sleep(0.05)
        x = torch.randn(8, 16)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        if step % 40 == 0:
            save(model, folder, step)
    dist.barrier()
    dist.destroy_process_group()


main()
