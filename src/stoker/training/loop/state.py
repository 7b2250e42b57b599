"""What a checkpoint holds: parameters and optimizer state under names that do not depend on ranks or strategy."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from stoker.training.optim.optimizer import Optimizer


def tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    for name, tensor, like in optimizer.state():
        found[f"optim.{name}"] = _sharded_like(tensor, like)
    return found


def _sharded_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Optimizer state is made of local pieces; with its parameter's mesh around it, a checkpoint knows which piece it
    is.
    """
    if not hasattr(parameter, "device_mesh") or hasattr(tensor, "device_mesh"):
        return tensor
    from torch.distributed.tensor import DTensor

    like: Any = parameter
    wrapped: Tensor = DTensor.from_local(
        tensor, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return wrapped
