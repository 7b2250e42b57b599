"""A mixture of experts: each token goes to the few experts its router chooses, and none is dropped.

Tokens are sorted by expert, so that all experts' products are one grouped product. Where torch or the GPU has none, each
expert's product is made alone. `rows` of the experts' matrices lie one below the other in one parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stoker.training.model.config import ModelConfig, gate_up_rows
from stoker.training.model.linear import activation

# rows sorted by expert, [experts, out, in], where each expert's end
Product = Callable[[Tensor, Tensor, Tensor], Tensor]


class Stack(nn.Module):
    """Matrices of all experts. `parts`: rows of each map that is joined in it."""

    def __init__(self, inputs: int, *parts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(sum(parts), inputs))
        self.parts = parts


class Experts(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.c = c
        self.router = nn.Linear(c.dim, c.experts, bias=False)
        self.gate_up = Stack(c.dim, *gate_up_rows(c, c.expert_ff) * c.experts)
        self.down = Stack(c.expert_ff, *(c.dim,) * c.experts)

    def forward(self, x: Tensor, counted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(answers, [2, experts]: tokens each was given, and its probabilities' sum), of `counted` tokens alone."""
        flat = x.flatten(0, -2)
        weights = (part.weight.to(x.dtype) for part in (self.router, self.gate_up, self.down))
        y, load = mixture(self.c, flat, *weights, counted=counted)
        return y.view_as(x), load


def mixture(
    c: ModelConfig, x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, *, counted: Tensor | None = None,
    captured: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As Experts.forward, for x [tokens, width]. `captured`: in a CUDA graph, where the host can't look at counts."""
    probability = F.linear(x, router).float().softmax(-1)
    share, chosen = probability.topk(c.experts_per_token, dim=-1)
    if c.router_sum:
        share = share / share.sum(-1, keepdim=True)
    wide, narrow = gate_up.view(c.experts, -1, c.dim), down.view(c.experts, c.dim, -1)
    activate = activation(c)
    # Elsewhere than on these, torch's grouped product may look at the counts on the host.
    direct = grouped(x, c) and torch.cuda.get_device_capability(x.device)[0] in (9, 10)
    if captured and not direct:
        y = _by_all(x, wide, narrow, activate, chosen, share)
    else:
        y = _by_chosen(x, wide, narrow, activate, chosen, share, _together if grouped(x, c) else _one_by_one)
    return y, _load(probability, chosen, counted)


def grouped(x: Tensor, c: ModelConfig) -> bool:
    """Whether torch's grouped product takes these. It needs bf16, 16-byte rows, and a GPU since Ampere."""
    return x.is_cuda and x.dtype == torch.bfloat16 and ungrouped(c, x.device) == ""


def ungrouped(c: ModelConfig, device: torch.device) -> str:
    """Why experts are computed one by one on this GPU; empty: they are not."""
    if not hasattr(F, "grouped_mm") and not hasattr(torch, "_grouped_mm"):
        return f"torch {torch.__version__} has no grouped product"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "grouped products need a GPU of compute capability 8.0 or later"
    if c.dim % 8 or c.expert_ff % 8:
        return f"grouped products need widths that 8 divides, not {c.dim} and {c.expert_ff}"
    return ""


def _by_chosen(
    x: Tensor, wide: Tensor, narrow: Tensor, activate: Callable[[Tensor], Tensor], chosen: Tensor, share: Tensor,
    product: Product,
) -> Tensor:  # fmt: skip
    tokens, each = chosen.shape
    sorted_experts, order = chosen.flatten().sort(stable=True)
    experts = torch.arange(len(wide), device=x.device)
    ends = torch.searchsorted(sorted_experts, experts, right=True).to(torch.int32)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    rows = _Permuted.apply(x[:, None].expand(-1, each, -1).reshape(tokens * each, -1), order, back)  # type: ignore[no-untyped-call]
    out = product(activate(product(rows, wide, ends)), narrow, ends)
    out = _Permuted.apply(out, back, order)  # type: ignore[no-untyped-call]
    return _added(out.view(tokens, each, -1), share)


class _Permuted(torch.autograd.Function):
    """Its gradient is the permutation back: torch would add up rows, which is slow, and in any order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x[order]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        return gradients[0][ctx.saved_tensors[0]], None, None


def _together(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    product = F.grouped_mm if hasattr(F, "grouped_mm") else torch._grouped_mm
    found: Tensor = product(x, weights.transpose(-1, -2), offs=ends)
    return found


def _one_by_one(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    pairs = zip(torch.split(x, counts), weights, strict=True)
    return torch.cat([F.linear(rows, weight) for rows, weight in pairs])


def _by_all(
    x: Tensor, wide: Tensor, narrow: Tensor, activate: Callable[[Tensor], Tensor], chosen: Tensor, share: Tensor
) -> Tensor:
    """Every expert computes every token: fixed shapes, for the few tokens of a decoding step."""
    out = activate(x[None] @ wide.transpose(-1, -2)) @ narrow.transpose(-1, -2)  # [experts, tokens, width]
    out = out.transpose(0, 1).gather(1, chosen[..., None].expand(-1, -1, x.shape[-1]))
    return _added(out, share)


def _added(out: Tensor, share: Tensor) -> Tensor:
    """The chosen experts' answers [tokens, chosen, width], weighted."""
    return (out.float() * share[..., None]).sum(1).to(out.dtype)


def _load(probability: Tensor, chosen: Tensor, counted: Tensor | None) -> Tensor:
    weight = torch.ones_like(probability[:, 0]) if counted is None else counted.flatten().to(probability.dtype)
    given = torch.zeros_like(probability).scatter_(1, chosen, 1.0)
    return torch.stack([(weight[:, None] * one).sum(0) for one in (given, probability)])


def balance_loss(load: Tensor, tokens: Tensor, c: ModelConfig) -> Tensor:
    """As transformers: experts · Σ (share of tokens · mean probability), over all layers. `tokens`: counted in each."""
    given, probability = load / (tokens * sum(c.routed(layer) for layer in range(c.layers)))
    loss: Tensor = c.experts * (given.detach() * probability).sum()
    return loss
