"""One optimizer for a run: AdamW, AdamW with 8-bit moments, or Muon for the matrices and AdamW for the rest.

Clipping and the skip of a bad step happen on the device: the fused kernels divide by `grad_scale` and do nothing where
`found_inf` is set, so a step needs no word from the GPU. All rules work on a rank's own piece of a parameter (FSDP2); Muon
puts a matrix together for its products (muon.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from stoker.training.optim.config import OptimConfig, blocks_of
from stoker.training.optim.host import Visit, at_home, chunks
from stoker.training.optim.muon import Muon, cut_over, local

State = tuple[Tensor, Tensor, Tensor, Tensor]  # both moments' codes and scales


class AdamW:
    """Over parameters with the same weight decay; torch's fused kernel, on CPUs too. `visits`: where an update computes, if
    moments live in host memory."""

    def __init__(
        self, named: Mapping[str, Tensor], c: OptimConfig, weight_decay: float, visits: torch.device | None = None
    ) -> None:
        self._c, self._decay, self._visits = c, weight_decay, visits
        self.named = named
        self._parameters = [local(p.detach()) for p in named.values()]
        empty = torch.zeros_like if visits is None else at_home
        self._first = [empty(p) for p in self._parameters]
        self._second = [empty(p) for p in self._parameters]
        self._counts = [torch.zeros((), dtype=torch.float32, device=visits or p.device) for p in self._parameters]

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
        if self._visits is None:
            self._fused(
                self._parameters, gradients, self._first, self._second, self._counts, share, grad_scale, found_inf
            )
        else:
            self._by_visits(self._visits, gradients, share, grad_scale, found_inf)
        torch._foreach_sub_(self._counts, [found_inf] * len(self._counts))

    def _by_visits(
        self, device: torch.device, gradients: list[Tensor], share: float, grad_scale: Tensor, found_inf: Tensor
    ) -> None:
        visit = Visit(device)
        for some in chunks([4 * p.nbytes for p in self._parameters]):
            first, second = ([visit.bring(kept[n]) for n in some] for kept in (self._first, self._second))
            away = self._parameters[some[0]].device != device  # and with them their gradients
            weights = [visit.bring(self._parameters[n]) if away else self._parameters[n] for n in some]
            given = [visit.bring(gradients[n], back=False) if away else gradients[n] for n in some]
            counts = [self._counts[n] for n in some]
            self._fused(weights, given, first, second, counts, share, grad_scale, found_inf)
            visit.leave()

    def _fused(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        first: list[Tensor],
        second: list[Tensor],
        counts: list[Tensor],
        share: float,
        grad_scale: Tensor,
        found_inf: Tensor,
    ) -> None:
        torch._fused_adamw_(
            parameters,
            gradients,
            first,
            second,
            [],
            counts,
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


def pack_first(x: Tensor) -> tuple[Tensor, Tensor]:
    """[blocks, numbers] fp32 → uint8 codes (128 is 0), scales [blocks]."""
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
    rate, decay, grad_scale, found_inf, steps, correction1, correction2 = now
    codes1, scale1, codes2, scale2 = state
    numbers = weight.shape[-1]
    count, size = blocks_of(numbers)
    blocks, missing = weight.numel() // numbers * count, count * size - numbers
    rows = (gradient / grad_scale).float()
    if missing:
        rows = torch.nn.functional.pad(rows, (0, missing))
    else:  # in one shape from here on: a compiler makes one kernel of it, and keeps no moments in fp32 between two
        weight, rows = weight.view(blocks, size), rows.reshape(blocks, size)
    flat = rows.view(blocks, size)
    codes1, codes2 = codes1.view_as(flat), codes2.view_as(flat)
    scale1, scale2 = scale1.view(-1), scale2.view(-1)
    first = torch.lerp(flat, unpack_first(codes1, scale1), betas[0])
    second = torch.lerp(flat.square(), unpack_second(codes2, scale2), betas[1])
    step = (first / correction1) / ((second / correction2).sqrt() + eps)
    by = step.view_as(rows)[..., :numbers] if missing else step
    moved = weight * (1 - rate * decay) - rate * by
    bad = found_inf > 0
    weight.copy_(torch.where(bad, weight, moved))
    for kept, new in zip(
        (codes1, scale1, codes2, scale2), (*pack_first(first), *pack_second(second, steps)), strict=True
    ):
        kept.copy_(torch.where(bad, kept, new))


class EightBit:
    """AdamW whose two moments take a byte each instead of four; on GPUs one compiled kernel per parameter's shape.

    Each block of up to 256 numbers of a row has its own scale: a block never goes on in the next row, so that ranks that hold
    rows (FSDP2) compute what one that holds all of them does. The codes are not linear: the first moment is stored as a signed square
    root, the second as a fourth root and never as 0, so that small second moments keep their order of magnitude (a
    linear code makes them 0, and the step infinite). A step changes a second moment by less than one code: rounded up,
    or to the nearest, small ones never decay again (a small regression ended at 1.6 times the loss). Which way they are
    rounded is spread evenly over places and steps, and depends on nothing else: a resumed run rounds as an uninterrupted one.
    """

    def __init__(
        self, named: Mapping[str, Tensor], c: OptimConfig, weight_decay: float, visits: torch.device | None = None
    ) -> None:
        self._c, self._decay, self.named, self._visits = c, weight_decay, named, visits
        self._pieces = {name: local(p.detach()) for name, p in named.items()}
        self._state: dict[str, State] = {}
        self._steps = torch.zeros((), device=visits or next(iter(self._pieces.values())).device)
        for name, p in self._pieces.items():
            count, size = blocks_of(p.shape[-1])
            shape, home = (*p.shape[:-1], count * size), p.device if visits is None else torch.device("cpu")
            codes = [torch.full(shape, start, dtype=torch.uint8, device=home) for start in (128, 0)]
            scales = [torch.zeros((*p.shape[:-1], count), device=home) for _ in range(2)]
            self._state[name] = (codes[0], scales[0], codes[1], scales[1])
        self._run = torch.compile(_update, dynamic=False) if self._steps.is_cuda else _update

    def state(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        for name, tensors in self._state.items():
            for kind, tensor in zip(("first", "first_scale", "second", "second_scale"), tensors, strict=True):
                yield f"{name}.{kind}8", tensor, self.named[name]

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
            if self._pieces[name].numel():  # ranks may have no row of a small one
                piece, gradient = self._pieces[name], local(parameter.grad)
                if self._visits is None:
                    self._run(piece, gradient, self._state[name], now, (c.beta1, c.beta2), c.eps)
                    continue
                visit = Visit(self._visits)
                codes1, scale1, codes2, scale2 = map(visit.bring, self._state[name])
                if piece.device != self._visits:
                    piece, gradient = visit.bring(piece), visit.bring(gradient, back=False)
                self._run(piece, gradient, (codes1, scale1, codes2, scale2), now, (c.beta1, c.beta2), c.eps)
                visit.leave()


Rule = AdamW | EightBit | Muon


class Optimizer:
    def __init__(self, model: nn.Module, c: OptimConfig, visits: torch.device | None = None) -> None:
        """`visits`: moments, and what of the model is there, live in host memory and are updated on this device."""
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
            self.rules = [EightBit(matrices, c, c.weight_decay, visits), AdamW(vectors, c, 0.0, visits)]
        else:
            self.rules = [AdamW(matrices, c, c.weight_decay, visits), AdamW(vectors, c, 0.0, visits)]
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
        if keep:  # a CUDA graph writes to the same place each time
            torch._foreach_zero_([p.grad for p in self.parameters if p.grad is not None])
            return
        for parameter in self.parameters:
            parameter.grad = None


def gradient_norm(parameters: Sequence[Tensor]) -> Tensor:
    """The 2-norm over everything, before clipping; fp32. Sharded gradients (FSDP2) are summed over the ranks."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norms = torch.stack(torch._foreach_norm([local(g) for g in gradients], 2.0, dtype=torch.float32))
    if gradients and hasattr(gradients[0], "to_local"):
        square = norms.square().sum().to(gradients[0].device_mesh.device_type)  # type: ignore[attr-defined]
        torch.distributed.all_reduce(square, group=cut_over(gradients[0])[0])
        return square.sqrt()
    return norms.square().sum().sqrt()
