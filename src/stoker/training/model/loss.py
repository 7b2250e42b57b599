"""Head and cross-entropy, or log-probabilities, in chunks: a batch's logits (8 GB for 16 K × 128 K words) never exist.

The gradient is made in the forward pass, chunk by chunk, while the logits are there; backward hands it out. `scale` is
part of it, so backward takes the incoming gradient to be 1: call .backward() on this result, or on a sum that holds it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
# logits of one chunk: 2,048 tokens × 128 K words; larger products gain nothing on an H200, and this is peak memory
CHUNK_BYTES = 1 << 29


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor | None, how: str = "auto", cap: float = 0.0
) -> Tensor:
    """Σ over tokens of the loss, times `scale`. x [N, D], weight [V, D], targets [N]."""
    if how == "plain":
        logits = capped(F.linear(x, weight.to(x.dtype)), cap)
        loss = F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")
        return loss if scale is None else loss * scale
    if how == "liger":
        assert not cap, "ready refuses it"
        return _liger(x, weight, targets, scale)
    if not torch.is_grad_enabled() or not (x.requires_grad or weight.requires_grad):
        return _forward_only(x, weight, targets, scale, cap)
    result: Tensor = _Chunked.apply(x, weight, targets, scale, cap)  # type: ignore[no-untyped-call]
    return result


def capped(logits: Tensor, cap: float) -> Tensor:
    """cap · tanh(logits / cap); 0: as they are."""
    return cap * torch.tanh(logits / cap) if cap else logits


def chunk_rows(tokens: int, vocabulary: int, itemsize: int) -> int:
    rows = max(CHUNK_BYTES // (vocabulary * itemsize), 256) // 256 * 256
    return min(tokens, rows)


def _forward_only(x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor | None, cap: float) -> Tensor:
    w = weight.to(x.dtype)
    total = x.new_zeros((), dtype=torch.float32)
    rows = chunk_rows(len(x), len(w), 4)
    for begin in range(0, len(x), rows):
        part = slice(begin, begin + rows)
        logits = capped(F.linear(x[part], w), cap)
        total = total + F.cross_entropy(logits.float(), targets[part], ignore_index=IGNORED, reduction="sum")
    return total if scale is None else total * scale


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor | None, cap: float) -> Tensor:
        w = weight.to(x.dtype)
        if scale is None:
            scale = torch.ones((), device=x.device)
        rows = chunk_rows(len(x), len(w), x.element_size())
        dx, dw = torch.empty_like(x), _gradient_of(weight)
        losses = torch.empty(len(x), dtype=torch.float32, device=x.device)
        for begin in range(0, len(x), rows):
            part = slice(begin, begin + rows)
            logits = capped(x[part] @ w.t(), cap)
            slope = 1 - (logits / cap).square() if cap else None
            _gradient_in_place(logits, targets[part], scale, losses[part])
            if slope is not None:
                logits *= slope
            torch.mm(logits, w, out=dx[part])
            if dw is not None:
                accumulate(dw, logits, x[part])
            del logits, slope  # or the next chunk's are made beside them
        ctx.save_for_backward(dx, None if dw is None else dw.to(weight.dtype))
        return losses.sum() * scale

    @staticmethod
    def backward(ctx: Any, *gradient: Any) -> tuple[Tensor | None, ...]:
        dx, dw = ctx.saved_tensors
        return dx, dw, None, None, None


def _gradient_of(weight: Tensor) -> Tensor | None:
    """Where it is summed; None: the weight is frozen."""
    if not weight.requires_grad:
        return None
    return torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)


def accumulate(dw: Tensor, dlogits: Tensor, x: Tensor) -> None:
    """dw += dlogitsᵀ x, summed in fp32."""
    if dlogits.dtype == torch.float32:
        dw.addmm_(dlogits.t(), x)
    elif dlogits.is_cuda:
        torch.addmm(dw, dlogits.t(), x, out_dtype=torch.float32, out=dw)
    else:
        dw.add_(torch.mm(dlogits.t(), x))


def _gradient_in_place(logits: Tensor, targets: Tensor, scale: Tensor, losses: Tensor) -> None:
    """logits become dloss/dlogits × scale; losses get the loss of each token."""
    if logits.is_cuda:
        from stoker.training.model.fused_kernel import gradient_in_place  # Triton: on GPUs only

        gradient_in_place(logits, targets, scale, losses)
        return
    wide = logits.float()
    log_sum = wide.logsumexp(-1)
    counted = targets != IGNORED
    wanted = torch.where(counted, targets, 0)[:, None]
    losses.copy_(torch.where(counted, log_sum - wide.gather(-1, wanted)[:, 0], 0.0))
    factor = torch.where(counted, scale, 0.0)[:, None]
    gradient = (wide - log_sum[:, None]).exp_().mul_(factor)
    logits.copy_(gradient.scatter_add_(-1, wanted, -factor))


def _liger(x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor | None) -> Tensor:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Fused

    loss: Tensor = Fused.apply(x, weight.to(x.dtype), targets, None, None, IGNORED, 0.0, 0.0, "sum")[0]
    return loss if scale is None else loss * scale


def token_logprobs(
    x: Tensor, weight: Tensor, targets: Tensor, temperature: float, cap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(log-probability of targets [N], entropy [N]) of softmax(x weightᵀ / temperature), fp32. x [N, D], weight [V, D].
    The entropy has no gradient. `cap`: of the logits, which the backward pass makes again, chunk by chunk.
    """
    result: tuple[Tensor, Tensor] = _ChunkedLogprobs.apply(x, weight, targets, temperature, cap)  # type: ignore[no-untyped-call]
    return result


def _logits(x: Tensor, w: Tensor, temperature: float, cap: float) -> Tensor:
    wide = capped((x @ w.t()).float(), cap)
    return wide if temperature == 1.0 else wide.div_(temperature)


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, temperature: float, cap: float
    ) -> tuple[Tensor, Tensor]:
        w = weight.to(x.dtype)
        chosen, entropy, log_sums = (torch.empty(len(x), dtype=torch.float32, device=x.device) for _ in range(3))
        rows = max(chunk_rows(len(x), len(w), 4), 1)
        for begin in range(0, len(x), rows):
            part = slice(begin, begin + rows)
            logits = _logits(x[part], w, temperature, cap)
            log_sum = logits.logsumexp(-1)
            log_sums[part] = log_sum
            chosen[part] = logits.gather(-1, targets[part, None])[:, 0] - log_sum
            entropy[part] = log_sum - (logits - log_sum[:, None]).exp_().mul_(logits).sum(-1)
            del logits  # or the next chunk's are made beside them
        ctx.save_for_backward(x, weight, targets, log_sums)
        ctx.temperature, ctx.cap = temperature, cap
        ctx.mark_non_differentiable(entropy)
        return chosen, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        x, weight, targets, log_sums = ctx.saved_tensors
        scaled = gradients[0] / ctx.temperature
        w = weight.to(x.dtype)
        dx, dw = torch.empty_like(x), _gradient_of(weight)
        rows = max(chunk_rows(len(x), len(w), 4), 1)
        for begin in range(0, len(x), rows):
            part = slice(begin, begin + rows)
            logits = _logits(x[part], w, ctx.temperature, ctx.cap)
            slope = 1 - (logits * (ctx.temperature / ctx.cap)).square() if ctx.cap else None
            probability = logits.sub_(log_sums[part, None]).exp_()
            wide = probability.mul_(-scaled[part, None]).scatter_add_(-1, targets[part, None], scaled[part, None])
            dlogits = (wide if slope is None else wide.mul_(slope)).to(x.dtype)
            torch.mm(dlogits, w, out=dx[part])
            if dw is not None:
                accumulate(dw, dlogits, x[part])
            del logits, slope, probability, wide, dlogits
        return dx, None if dw is None else dw.to(weight.dtype), None, None, None
