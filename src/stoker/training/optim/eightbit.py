"""AdamW whose two moments take a byte each instead of four: 2 bytes a parameter instead of 8.

Each block of 256 numbers has its own scale. The codes are not linear: the first moment is stored as a signed square
root, the second as a fourth root and never as 0, so that small second moments keep their order of magnitude (a linear
code makes them 0, and the step infinite). A step changes a second moment by less than one code: rounded up, or to the
nearest, small ones never decay again (a small regression ended at 1.6 times the loss). Which way they are rounded is
spread evenly over places and steps, and depends on nothing else: a resumed run has the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from stoker.contract.names import EX_CONFIG, Refusal
from stoker.training.optim.config import OptimConfig

BLOCK = 256


def pack_first(x: Tensor) -> tuple[Tensor, Tensor]:
    """[blocks, BLOCK] fp32 → uint8 codes (128 is 0), scales [blocks]."""
    scale = x.abs().amax(-1, keepdim=True)
    root = torch.sign(x) * (x.abs() / scale.clamp(min=1e-38)).sqrt()
    return (root * 127).round().add_(128).to(torch.uint8), scale[:, 0]


def unpack_first(codes: Tensor, scale: Tensor) -> Tensor:
    root = (codes.float() - 128) / 127
    return torch.sign(root) * root.square() * scale[:, None]


def pack_second(x: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.amax(-1, keepdim=True)
    # Multiples of the golden ratio and of the plastic number's inverse: evenly spread in [0, 1) along each.
    threshold = (torch.arange(x.shape[-1], device=x.device) * 0.6180340 + (step % 4096) * 0.7548777) % 1.0
    codes = ((x / scale.clamp(min=1e-38)).sqrt().sqrt() * 255 + threshold).floor().clamp(0, 255)
    return torch.where(x > 0, codes.clamp(min=1), codes).to(torch.uint8), scale[:, 0]


def unpack_second(codes: Tensor, scale: Tensor) -> Tensor:
    return (codes.float() / 255).square().square() * scale[:, None]


def _update(
    weight: Tensor,
    gradient: Tensor,
    codes1: Tensor,
    scale1: Tensor,
    codes2: Tensor,
    scale2: Tensor,
    rate: Tensor,
    decay: Tensor,
    grad_scale: Tensor,
    found_inf: Tensor,
    count: Tensor,
    correction1: Tensor,
    correction2: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    size = weight.numel()
    room = codes1.numel() - size
    flat = torch.nn.functional.pad((gradient / grad_scale).flatten().float(), (0, room)).view(-1, BLOCK)
    first = torch.lerp(flat, unpack_first(codes1, scale1), beta1)
    second = torch.lerp(flat.square(), unpack_second(codes2, scale2), beta2)
    step = (first / correction1) / ((second / correction2).sqrt() + eps)
    moved = weight * (1 - rate * decay) - rate * step.flatten()[:size].view_as(weight)
    bad = found_inf > 0
    weight.copy_(torch.where(bad, weight, moved))
    for kept, new in zip(
        (codes1, scale1, codes2, scale2), (*pack_first(first), *pack_second(second, count)), strict=True
    ):
        kept.copy_(torch.where(bad, kept, new))


class EightBit:
    """One compiled kernel per parameter's shape on GPUs; the same lines run eagerly elsewhere."""

    def __init__(self, named: Mapping[str, Tensor], c: OptimConfig, weight_decay: float) -> None:
        if any(hasattr(p, "to_local") for p in named.values()):
            raise Refusal(
                "optim.kind adamw8bit has no sharded form yet: use parallel.strategy ddp, or optim.kind adamw",
                EX_CONFIG,
            )
        self._c, self._decay, self.named = c, weight_decay, named
        self._state: dict[str, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
        self._steps = torch.zeros((), device=next(iter(named.values())).device)
        for name, p in named.items():
            blocks = -(-p.numel() // BLOCK)
            codes = [torch.full((blocks, BLOCK), start, dtype=torch.uint8, device=p.device) for start in (128, 0)]
            scales = [torch.zeros(blocks, device=p.device) for _ in range(2)]
            self._state[name] = (codes[0], scales[0], codes[1], scales[1])
        self._run = torch.compile(_update, dynamic=False) if next(iter(named.values())).is_cuda else _update

    def state(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        for name, tensors in self._state.items():
            for kind, tensor in zip(("first", "first_scale", "second", "second_scale"), tensors, strict=True):
                yield f"{name}.{kind}8", tensor, tensor

    def set_count(self, steps: int) -> None:
        self._steps.fill_(float(steps))

    @torch.no_grad()
    def step(self, share: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        c = self._c
        self._steps += 1.0 - found_inf
        first, second = (1.0 - beta ** self._steps.clamp(min=1.0) for beta in (c.beta1, c.beta2))
        rate, decay = (torch.tensor(value) for value in (c.learning_rate * share, self._decay))
        if self._steps.is_cuda:
            rate, decay = (
                rate.to(self._steps.device, non_blocking=True),
                decay.to(self._steps.device, non_blocking=True),
            )
        for name, parameter in self.named.items():
            assert parameter.grad is not None, name
            self._run(
                parameter.detach(),
                parameter.grad,
                *self._state[name],
                rate,
                decay,
                grad_scale,
                found_inf,
                self._steps,
                first,
                second,
                c.beta1,
                c.beta2,
                c.eps,
            )
