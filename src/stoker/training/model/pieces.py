"""Tensors that a rank has a part of (FSDP2): from the whole, and back to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def like(whole: Tensor, parameter: Tensor) -> Tensor:
    """Laid out as the parameter is: a rank's shard of a tensor that every rank has."""
    if not hasattr(parameter, "device_mesh"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)  # type: ignore[attr-defined]


def whole(tensor: Tensor) -> Tensor:
    """Of a shard all ranks ask, or they wait for each other."""
    found: Tensor = tensor.detach()
    return found.full_tensor() if hasattr(found, "full_tensor") else found


def give_back(model: torch.nn.Module) -> None:
    """Weights that FSDP2 still holds gathered: the outermost ones, after a pass without gradients."""
    module: Any
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
