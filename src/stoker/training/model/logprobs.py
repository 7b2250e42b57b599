"""Log-probability and entropy of chosen tokens, in chunks: fp32 logits of a whole batch (10 GB for 16 K tokens × 152 K
words) never exist.

The backward pass makes a chunk's logits again; what is kept is the input and one number per token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stoker.training.model.loss import accumulate, capped, chunk_rows


def token_logprobs(
    x: Tensor, weight: Tensor, targets: Tensor, temperature: float, cap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(log-probability of targets [N], entropy [N]) of softmax(x weightᵀ / temperature), fp32. x [N, D], weight [V, D].
    The entropy has no gradient. `cap`: of the logits.
    """
    result: tuple[Tensor, Tensor] = _Chunked.apply(x, weight, targets, temperature, cap)  # type: ignore[no-untyped-call]
    return result


def _logits(x: Tensor, w: Tensor, temperature: float, cap: float) -> Tensor:
    wide = capped((x @ w.t()).float(), cap)
    return wide if temperature == 1.0 else wide.div_(temperature)


class _Chunked(torch.autograd.Function):
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
        ctx.save_for_backward(x, weight, targets, log_sums)
        ctx.temperature, ctx.cap = temperature, cap
        ctx.mark_non_differentiable(entropy)
        return chosen, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        x, weight, targets, log_sums = ctx.saved_tensors
        scaled = gradients[0] / ctx.temperature
        w = weight.to(x.dtype)
        dx = torch.empty_like(x)
        dw = torch.zeros(weight.shape, dtype=torch.float32, device=x.device)
        rows = max(chunk_rows(len(x), len(w), 4), 1)
        for begin in range(0, len(x), rows):
            part = slice(begin, begin + rows)
            logits = _logits(x[part], w, ctx.temperature, ctx.cap)
            slope = 1 - (logits * (ctx.temperature / ctx.cap)).square() if ctx.cap else None
            probability = logits.sub_(log_sums[part, None]).exp_()
            wide = probability.mul_(-scaled[part, None]).scatter_add_(-1, targets[part, None], scaled[part, None])
            dlogits = (wide if slope is None else wide.mul_(slope)).to(x.dtype)
            torch.mm(dlogits, w, out=dx[part])
            accumulate(dw, dlogits, x[part])
        return dx, dw.to(weight.dtype), None, None, None
