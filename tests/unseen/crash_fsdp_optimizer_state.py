"""FSDP2: an optimizer hook on the last rank reads a state that is not there yet.

class: framework-crashes
kind: crash
ranks: 3
expect: @raised
rank: 2
line: required
must-mention: KeyError
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Monitor:
    def __init__(self, name: str) -> None:
        self.name = name

    def second_moment(self, opt: torch.optim.Optimizer) -> list[float]:
        means = []
        for group in opt.param_groups:
            for p in group["params"]:
                moment = opt.state[p][self.name]  # FAULT
                means.append(moment.to_local().mean().item())
        return means


def train(opt: torch.optim.Optimizer, model: torch.nn.Module, monitor: Monitor) -> None:
    for step in range(20):
        model(torch.randn(4, 9)).square().mean().backward()
        opt.step()
        opt.zero_grad()
        if step % 5 == 4:
            print(f"step {step}: {monitor.second_moment(opt)[0]:.2e}", flush=True)  # NEAR


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = torch.nn.Sequential(torch.nn.Linear(9, 9), torch.nn.Linear(9, 9))
fully_shard(model, mesh=mesh)
train(torch.optim.AdamW(model.parameters()), model, Monitor("max_exp_avg_sq" if dist.get_rank() == 2 else "exp_avg_sq"))
