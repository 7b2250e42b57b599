"""One optimizer for a run: AdamW, AdamW with 8-bit moments, or Muon for the matrices and AdamW for the rest.

Clipping and the skip of a bad step happen on the device: the fused kernels divide by `grad_scale` and do nothing where
`found_inf` is set, so a step needs no word from the GPU. AdamW works on a rank's local piece of a parameter (FSDP2);
the others need whole ones.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from stoker.contract.names import EX_CONFIG, Refusal
from stoker.training.optim.config import OptimConfig

BLOCK = 256
State = tuple[Tensor, Tensor, Tensor, Tensor]  # both moments' codes and scales
_A, _B, _C = 3.4445, -4.7750, 2.0315
_STEPS = 5
MOMENTUM = 0.95


@functools.cache
def has_bf16(device: torch.device) -> bool:
    """In hardware: since Ampere (compute capability 8), and in AMD's."""
    return device.type == "cuda" and bool(torch.version.hip or torch.cuda.get_device_capability(device)[0] >= 8)


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
    weight: Tensor, gradient: Tensor, state: State, now: tuple[Tensor, ...], betas: tuple[float, float], eps: float
) -> None:
    """`now`: what changes from step to step, on the device."""
    rate, decay, grad_scale, found_inf, count, correction1, correction2 = now
    codes1, scale1, codes2, scale2 = state
    size = weight.numel()
    room = codes1.numel() - size
    flat = torch.nn.functional.pad((gradient / grad_scale).flatten().float(), (0, room)).view(-1, BLOCK)
    first = torch.lerp(flat, unpack_first(codes1, scale1), betas[0])
    second = torch.lerp(flat.square(), unpack_second(codes2, scale2), betas[1])
    step = (first / correction1) / ((second / correction2).sqrt() + eps)
    moved = weight * (1 - rate * decay) - rate * step.flatten()[:size].view_as(weight)
    bad = found_inf > 0
    weight.copy_(torch.where(bad, weight, moved))
    for kept, new in zip(state, (*pack_first(first), *pack_second(second, count)), strict=True):
        kept.copy_(torch.where(bad, kept, new))


class EightBit:
    """AdamW whose two moments take a byte each instead of four; on GPUs one compiled kernel per parameter's shape.

    Each block of 256 numbers has its own scale. The codes are not linear: the first moment is stored as a signed square
    root, the second as a fourth root and never as 0, so that small second moments keep their order of magnitude (a
    linear code makes them 0, and the step infinite). A step changes a second moment by less than one code: rounded up,
    or to the nearest, small ones never decay again (a small regression ended at 1.6 times the loss). Which way they are
    rounded is spread evenly over places and steps, and depends on nothing else: a resumed run has the same bits.
    """

    def __init__(self, named: Mapping[str, Tensor], c: OptimConfig, weight_decay: float) -> None:
        self._c, self._decay, self.named = c, weight_decay, named
        self._state: dict[str, State] = {}
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
        rate, decay = (
            torch.tensor(value).to(self._steps.device, non_blocking=True)
            for value in (c.learning_rate * share, self._decay)
        )
        now = (rate, decay, grad_scale, found_inf, self._steps, first, second)
        for name, parameter in self.named.items():
            assert parameter.grad is not None, name
            self._run(parameter.detach(), parameter.grad, self._state[name], now, (c.beta1, c.beta2), c.eps)


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
    """Momentum whose singular values are all pushed to 1, for the matrices inside the blocks.

    The two fused matrices (qkv, gate_up) are taken apart: each part is a map of its own. Matrices of one shape are
    orthogonalised together in one batch of products. https://kellerjordan.github.io/posts/muon/ has the method and the
    five-step polynomial's coefficients.
    """

    def __init__(self, named: Mapping[str, Tensor], parts: dict[str, tuple[int, ...]], c: OptimConfig) -> None:
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
            update = orthogonal(stacked, torch.bfloat16 if has_bf16(stacked.device) else torch.float32)
            factor = max(1.0, size[0] / size[1]) ** 0.5
            for (name, begin, end), one in zip(places, update, strict=True):
                weight = self.named[name].detach()[begin:end]
                weight.mul_(1.0 - good * rate * self._c.weight_decay)
                weight.sub_(one.to(weight.dtype) * (good * rate * factor))


Rule = AdamW | EightBit | Muon


class Optimizer:
    def __init__(self, model: nn.Module, c: OptimConfig) -> None:
        self._c = c
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        matrices = {name: p for name, p in named.items() if p.dim() >= 2}
        vectors = {name: p for name, p in named.items() if p.dim() < 2}
        if c.kind != "adamw" and any(hasattr(p, "to_local") for p in named.values()):
            raise Refusal(
                f"optim.kind {c.kind} needs whole matrices on each rank: use parallel.strategy ddp, or optim.kind"
                " adamw",
                EX_CONFIG,
            )
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
        self._whole = [p for p in self.parameters if not hasattr(p, "to_local")]

    def state(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        for rule in self.rules:
            yield from rule.state()

    def set_count(self, steps: int) -> None:
        for rule in self.rules:
            rule.set_count(steps)

    def step(self, share: float, norm: Tensor, bad: Tensor, loss_scale: Tensor | None = None) -> None:
        """`norm`: of all gradients together; `bad`: 1.0 where this step must not count; `loss_scale`: what the gradients are
        to be divided by, the norm was already."""
        limit = self._c.max_grad_norm
        scale = (norm / limit).clamp(min=1.0) if limit > 0 else torch.ones_like(norm)
        if loss_scale is not None:
            scale = scale * loss_scale
        for rule in self.rules:
            rule.step(share, scale, bad)
        # torch's fused kernels don't say that they wrote; an adapter makes its 16-bit copies anew when its numbers have moved.
        torch.autograd.graph.increment_version(self._whole)

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
