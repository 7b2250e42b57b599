"""One optimizer for a run: AdamW, AdamW with 8-bit moments, or Muon for the matrices and AdamW for the rest.

Clipping and the skip of a bad step happen on the device: the fused kernels divide by `grad_scale` and do nothing where
`found_inf` is set, so a step needs no word from the GPU. Every rule works on a rank's local piece of a parameter
(FSDP2), or says that it can't.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from stoker.training.optim.config import OptimConfig
from stoker.training.optim.eightbit import EightBit
from stoker.training.optim.muon import Muon


def local(tensor: Tensor) -> Tensor:
    """A rank's own piece."""
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


class AdamW:
    """Over parameters with the same weight decay; torch's fused kernel, on CPUs too."""

    def __init__(self, named: Mapping[str, Tensor], c: OptimConfig, weight_decay: float) -> None:
        self._c, self._decay = c, weight_decay
        self.named = named
        self._parameters = [local(p.detach()) for p in named.values()]
        self._first = [torch.zeros_like(p) for p in self._parameters]
        self._second = [torch.zeros_like(p) for p in self._parameters]
        self._counts = [torch.zeros((), dtype=torch.float32, device=p.device) for p in self._parameters]

    def state(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(name, tensor, the parameter whose layout it has)."""
        for n, (name, parameter) in enumerate(self.named.items()):
            yield f"{name}.first", self._first[n], parameter
            yield f"{name}.second", self._second[n], parameter

    def set_count(self, steps: int) -> None:
        for count in self._counts:
            count.fill_(float(steps))

    def step(self, share: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        if not self._parameters:
            return
        gradients = [local(p.grad) for p in self.named.values() if p.grad is not None]
        assert len(gradients) == len(self._parameters), "a parameter has no gradient"
        torch._foreach_add_(self._counts, 1.0)
        torch._fused_adamw_(
            self._parameters,
            gradients,
            self._first,
            self._second,
            [],
            self._counts,
            lr=self._c.learning_rate * share,
            beta1=self._c.beta1,
            beta2=self._c.beta2,
            weight_decay=self._decay,
            eps=self._c.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=grad_scale,
            found_inf=found_inf,
        )
        torch._foreach_sub_(self._counts, [found_inf] * len(self._counts))


Rule = AdamW | EightBit | Muon


class Optimizer:
    def __init__(self, model: nn.Module, c: OptimConfig) -> None:
        self._c = c
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        matrices = {name: p for name, p in named.items() if p.dim() >= 2}
        vectors = {name: p for name, p in named.items() if p.dim() < 2}
        self.rules: list[Rule] = []
        if c.kind == "muon":
            inner = {name: p for name, p in matrices.items() if not name.startswith(("embed", "head", "positions"))}
            outer = {name: p for name, p in matrices.items() if name not in inner}
            parts = {
                f"{name}.weight": module.parts for name, module in model.named_modules() if hasattr(module, "parts")
            }
            self.rules = [Muon(inner, parts, c), AdamW(outer, c, 0.0), AdamW(vectors, c, 0.0)]
        elif c.kind == "adamw8bit":
            self.rules = [EightBit(matrices, c, c.weight_decay), AdamW(vectors, c, 0.0)]
        else:
            self.rules = [AdamW(matrices, c, c.weight_decay), AdamW(vectors, c, 0.0)]
        self.parameters = list(named.values())

    def state(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        for rule in self.rules:
            yield from rule.state()

    def set_count(self, steps: int) -> None:
        for rule in self.rules:
            rule.set_count(steps)

    def step(self, share: float, norm: Tensor, bad: Tensor) -> None:
        """`norm`: of all gradients together; `bad`: 1.0 where this step must not count."""
        limit = self._c.max_grad_norm
        scale = (norm / limit).clamp(min=1.0) if limit > 0 else torch.ones_like(norm)
        for rule in self.rules:
            rule.step(share, scale, bad)

    def zero(self, keep: bool = False) -> None:
        for parameter in self.parameters:
            if keep and parameter.grad is not None:  # a CUDA graph writes to the same place each time
                parameter.grad.zero_()
            else:
                parameter.grad = None


def gradient_norm(parameters: Sequence[Tensor]) -> Tensor:
    """The 2-norm over everything, before clipping; fp32. Sharded gradients (FSDP2) are summed over the ranks."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norms = torch.stack(torch._foreach_norm([local(g) for g in gradients], 2.0, dtype=torch.float32))
    if gradients and hasattr(gradients[0], "to_local"):
        square = norms.square().sum()
        torch.distributed.all_reduce(square)
        return square.sqrt()
    return norms.square().sum().sqrt()
