"""Tensors that a rank has a part of (FSDP2): from the whole, and back to it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stoker.training.optim.muon import cut_over


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


def collected(tensor: Tensor) -> Tensor:
    """Whole in rank 0's host memory; on other ranks nothing, and no more than their shard ever. All ranks of a shard ask."""
    found: Any = tensor.detach()
    if not hasattr(found, "full_tensor"):
        return found  # type: ignore[no-any-return]
    group, rank, ranks = cut_over(found)
    nothing, first = torch.empty(0, dtype=found.dtype), dist.get_process_group_ranks(group)[0]
    if first != 0:  # copies of what rank 0's host has
        return nothing
    rows, own = found.shape[0], found.to_local().cpu()
    each = -(-rows // ranks)  # as torch.chunk cuts them: the last ones are smaller, or empty
    sent = own if len(own) == each else torch.cat([own, own.new_zeros(each - len(own), *own.shape[1:])])
    came = [torch.empty_like(sent) for _ in range(ranks)] if rank == 0 else None
    dist.gather(sent.contiguous(), came, dst=0, group=group)
    return nothing if came is None else torch.cat(came)[:rows]


def give_back(model: torch.nn.Module) -> None:
    """Weights that FSDP2 still holds gathered: the outermost ones, after a pass without gradients."""
    module: Any
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
