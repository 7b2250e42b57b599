"""FSDP2; the full state dict is collected on all ranks and written on one.

class: healthy
kind: healthy
ranks: 2
"""

import tempfile

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU()) for _ in range(3)])
for block in model:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(40):
    loss = model(torch.randn(4, 16)).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    if step % 20 == 19:
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            with tempfile.NamedTemporaryFile() as file:
                torch.save(state, file)
            print(f"step {step}: saved, loss {loss.item():.4f}", flush=True)
dist.barrier()
dist.destroy_process_group()
