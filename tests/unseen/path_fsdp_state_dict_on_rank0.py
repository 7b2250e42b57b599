"""FSDP2: the full state dict is collected on rank 0 only.

class: common-path
kind: hang
ranks: 2
expect: @diverged
rank: 0
line: required
"""

import tempfile

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(16, 64)
        self.down = torch.nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def save(model: torch.nn.Module, path: str) -> None:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)  # FAULT
    torch.save(state, path)


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = torch.nn.Sequential(*[Block() for _ in range(2)])
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(40):
        loss = model(torch.randn(4, 16)).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        if step % 10 == 9 and dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
            save(model, tempfile.gettempdir() + "/unseen_fsdp_model.pt")  # NEAR
    dist.destroy_process_group()


main()
