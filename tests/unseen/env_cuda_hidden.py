"""CUDA_VISIBLE_DEVICES is set to nothing in the script, and the batch goes to cuda.

class: environment
kind: crash
ranks: 3
expect: env.cuda-build, gpu.*
rank: any
line: required
"""

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
import torch.distributed as dist


def to_device(batch: dict[str, torch.Tensor], device: str) -> dict[str, torch.Tensor]:
    return {name: t.to(device) for name, t in batch.items()}  # FAULT


def main() -> None:
    dist.init_process_group("gloo")
    batch = to_device({"x": torch.randn(4, 4)}, f"cuda:{os.environ['LOCAL_RANK']}")  # NEAR
    print(batch["x"].sum())


main()
