"""Rank 0 alone saves a sharded model, which gathers it from all ranks; the others go on, wait in a barrier, or end."""

import sys
import time

import torch
import torch.distributed as dist
from moment import AT_STEP, RANK, fault
from torch.distributed.fsdp import fully_shard
from training import STEPS

GO_ON, WAIT, END = "go-on", "wait", "end"
others = sys.argv[1] if len(sys.argv) > 1 else WAIT


def save_model(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.full_tensor() for name, parameter in model.named_parameters()}


def train() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.05)
        if step == AT_STEP:
            if RANK == 0:
                fault()
                save_model(model)
            if others == WAIT:
                dist.barrier()
            if others == END:
                return


train()
