"""Matrix products in 8 bits, one scale per tensor, found anew for each product.

Forward (y = x wᵀ) and the gradient of the input run in fp8, the gradient of the weight stays in bf16: it would need
both operands transposed in memory, and it is the one that has to add up small numbers over all tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ACTIVATIONS, _GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2


def _scale(x: Tensor, kind: torch.dtype) -> Tensor:
    """What x is multiplied by so that its largest number just fits."""
    return torch.finfo(kind).max / x.abs().amax().float().clamp(min=1e-12)


def _cast(x: Tensor, scale: Tensor, kind: torch.dtype) -> Tensor:
    limit = torch.finfo(kind).max
    return (x.float() * scale).clamp(-limit, limit).to(kind)


def _product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: torch.dtype, fast: bool) -> Tensor:
    """b is column-major, as the hardware wants it."""
    return torch._scaled_mm(
        a, b, scale_a=a_scale.reciprocal(), scale_b=b_scale.reciprocal(), out_dtype=out, use_fast_accum=fast
    )


def output_product(x: Tensor, weight: Tensor, fp8: bool) -> Tensor:
    """x wᵀ in x's dtype."""
    if not fp8:
        return x @ weight.to(x.dtype).t()
    x_scale, w_scale = _scale(x, _ACTIVATIONS), _scale(weight, _ACTIVATIONS)
    return _product(
        _cast(x, x_scale, _ACTIVATIONS), x_scale, _cast(weight, w_scale, _ACTIVATIONS).t(), w_scale, x.dtype, True
    )


def input_product(g: Tensor, weight: Tensor, fp8: bool) -> Tensor:
    """g w: the gradient of x."""
    if not fp8:
        return g @ weight.to(g.dtype)
    g_scale, w_scale = _scale(g, _GRADIENTS), _scale(weight, _ACTIVATIONS)
    column_major = _cast(weight.t(), w_scale, _ACTIVATIONS).contiguous().t()
    return _product(_cast(g, g_scale, _GRADIENTS), g_scale, column_major, w_scale, g.dtype, False)


class _Fp8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return output_product(x, weight, True)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor]:
        (g,) = gradients
        x, weight = ctx.saved_tensors
        return input_product(g, weight, True), (g.t() @ x).to(weight.dtype)


def fp8_linear(x: Tensor, weight: Tensor) -> Tensor:
    flat: Tensor = _Fp8.apply(x.flatten(0, -2), weight)  # type: ignore[no-untyped-call]
    return flat.view(*x.shape[:-1], -1)


def fits(inputs: int, outputs: int) -> bool:
    """The hardware takes multiples of 16 only; below 1024 the casts cost more than the product saves."""
    return inputs % 16 == 0 and outputs % 16 == 0 and min(inputs, outputs) >= 1024


def available(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
