"""A model in shards (FSDP2): which weights are gathered together, and when.

A unit is gathered before it computes and given back after it. Each block is one; so are the embedding and the head, where
they are two tensors: beside a large vocabulary they are larger than any block, and would stay gathered for the whole step.
"""

from __future__ import annotations

from typing import Any

import torch

from stoker.training.parallel.config import EVERYTHING
from stoker.training.parallel.group import Group


def shard(model: Any, group: Group, dtype: torch.dtype | None, entry: str = "forward") -> None:
    """A decoder, in place. `dtype`: what weights are gathered in; None: as they are, which adapters beside 16 or 4 bits need:
    what learns keeps fp32, and codes are no numbers. `entry`: the method that a pass begins with.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    copies = group.world // group.shards  # hosts hold them
    sizes = (group.world,) if copies == 1 else (copies, group.shards)
    mesh = init_device_mesh(group.device.type, sizes, mesh_dim_names=("copies", "shards")[-len(sizes) :])
    # Inputs stay as they are: the loss's scale and the rotary table would lose bits they need.
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    # We lock the memory ourselves (optim/host.py).
    offload = CPUOffloadPolicy(pin_memory=False) if group.offload == EVERYTHING else OffloadPolicy()
    how: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "offload_policy": offload}
    for block in model.layers:
        fully_shard(block, **how)
    if model.head is not None:
        fully_shard(model.embed, **how)
        model.embed.set_unshard_in_backward(False)  # its gradient needs no weight
        # The loss reads the weight after `entered`; it is given back when its gradient is there.
        fully_shard(model.head, reshard_after_forward=False, **how)
        register_fsdp_forward_method(model.head, "entered")
    fully_shard(model, **how)
    register_fsdp_forward_method(model, "logits_at")
    if entry != "forward":
        register_fsdp_forward_method(model, entry)
    model.gathered_in = None if dtype == torch.float32 else dtype
    for module in model.modules():
        if isinstance(getattr(module, "sharded", None), bool):
            module.sharded = True
