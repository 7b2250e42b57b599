"""Muon: momentum whose singular values are all pushed to 1, for the matrices inside the blocks.

The two fused matrices (qkv, gate_up) are taken apart: each part is a map of its own. Matrices of one shape are
orthogonalised together in one batch of products. https://kellerjordan.github.io/posts/muon/ has the method and the
five-step polynomial's coefficients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from stoker.contract.names import EX_CONFIG, Refusal
from stoker.training.optim.config import OptimConfig

_A, _B, _C = 3.4445, -4.7750, 2.0315
_STEPS = 5
MOMENTUM = 0.95


def orthogonal(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., rows, columns] → its nearest matrix with singular values near 1 (0.7 to 1.2)."""
    x = x.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_STEPS):
        a = x @ x.mT
        x = _A * x + (_B * a + _C * a @ a) @ x
    return x.mT if tall else x


class Muon:
    def __init__(self, named: Mapping[str, Tensor], parts: dict[str, tuple[int, ...]], c: OptimConfig) -> None:
        if any(hasattr(p, "to_local") for p in named.values()):
            raise Refusal(
                "optim.kind muon needs whole matrices on each rank: use parallel.strategy ddp, or optim.kind adamw",
                EX_CONFIG,
            )
        self._c, self.named = c, named
        self._momentum = {name: torch.zeros_like(p) for name, p in named.items()}
        self._parts: dict[torch.Size, list[tuple[str, int, int]]] = {}
        for name, p in named.items():
            begin = 0
            for rows in parts.get(name, (p.shape[0],)):
                self._parts.setdefault(torch.Size((rows, p.shape[1])), []).append((name, begin, begin + rows))
                begin += rows

    def state(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        for name, parameter in self.named.items():
            yield f"{name}.momentum", self._momentum[name], parameter

    def set_count(self, steps: int) -> None:
        """Muon does not count its steps."""

    @torch.no_grad()
    def step(self, share: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        good = 1.0 - found_inf
        rate = self._c.muon_learning_rate * share
        names = list(self.named)
        gradients = []
        for name in names:
            gradient = self.named[name].grad
            assert gradient is not None, name
            gradients.append(torch.where(found_inf > 0, 0.0, gradient / grad_scale))
        momentum = [self._momentum[name] for name in names]
        # With found_inf nothing may move: the momentum's own decay is undone by its weight.
        torch._foreach_mul_(momentum, 1.0 - good * (1.0 - MOMENTUM))
        torch._foreach_add_(momentum, torch._foreach_mul(gradients, good))
        ahead = dict(zip(names, torch._foreach_add(gradients, momentum, alpha=MOMENTUM), strict=True))
        for size, places in self._parts.items():
            stacked = torch.stack([ahead[name][begin:end] for name, begin, end in places])
            update = orthogonal(stacked, torch.bfloat16 if stacked.is_cuda else torch.float32)
            factor = max(1.0, size[0] / size[1]) ** 0.5
            for (name, begin, end), one in zip(places, update, strict=True):
                weight = self.named[name].detach()[begin:end]
                weight.mul_(1.0 - good * rate * self._c.weight_decay)
                weight.sub_(one.to(weight.dtype) * (good * rate * factor))
