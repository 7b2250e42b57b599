"""A block without a compiler: products by cuBLAS, attention by cuDNN, the rest by six kernels of our own.

Kept for the backward pass: the residual stream before each norm, queries, keys and values, what attention and the wide
product made. Norms and SwiGLU's activations are made again by the kernels that need them anyway. The first step comes
after seconds: nothing is traced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stoker.training.model import fused_kernel as kernel
from stoker.training.model.attention import Seen, attend


def _weight_gradient(g: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    if weight.dtype == torch.float32 and g.is_cuda and g.dtype != torch.float32:
        return torch.mm(g.t(), x, out_dtype=torch.float32)
    return (g.t() @ x).to(weight.dtype)


class _NormLinear(torch.autograd.Function):
    """(x + delta, norm(x + delta) weightᵀ)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, scale: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        out, normed, rstd = kernel.add_norm(x, delta, scale, eps)
        ctx.save_for_backward(out, rstd, scale, weight)
        ctx.added = delta is not None
        product = normed @ weight.to(normed.dtype).t()
        return (out if delta is not None else x.view_as(x)), product

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        onward, g = gradients
        x, rstd, scale, weight = ctx.saved_tensors
        inner = g @ weight.to(g.dtype)
        dx, normed, dscale = kernel.norm_backward(inner, x, rstd, scale, onward)
        return dx, dx if ctx.added else None, dscale.to(scale.dtype), _weight_gradient(g, normed, weight), None


class _NormQkv(torch.autograd.Function):
    """(x + delta, queries, keys, values): norm, product and rotation; the three are parts of one buffer."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, scale: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor,
        heads: int, kv_heads: int, head_dim: int, kept: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        out, normed, rstd = kernel.add_norm(x, delta, scale, eps)
        qkv = normed @ weight.to(normed.dtype).t()
        if kept:
            qkv = qkv.clone()
        kernel.rotate_in_place(qkv, cos, sin, heads + kv_heads, head_dim, 1.0)
        ctx.save_for_backward(out, rstd, scale, weight, cos, sin)
        ctx.added, ctx.heads, ctx.kv_heads, ctx.head_dim = delta is not None, heads, kv_heads, head_dim
        q, k, v = torch.split(qkv, [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=1)
        return (out if delta is not None else x.view_as(x)), q, k, v

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        onward, dq, dk, dv = gradients
        x, rstd, scale, weight, cos, sin = ctx.saved_tensors
        g = torch.cat([dq, dk, dv], dim=1)
        kernel.rotate_in_place(g, cos, sin, ctx.heads + ctx.kv_heads, ctx.head_dim, -1.0)
        dx, normed, dscale = kernel.norm_backward(g @ weight.to(g.dtype), x, rstd, scale, onward)
        dweight = _weight_gradient(g, normed, weight)
        return dx, dx if ctx.added else None, dscale.to(scale.dtype), dweight, None, None, None, None, None, None, None


class _NormRotate(torch.autograd.Function):
    """(queries and keys, values) of qkv, the former normalised head by head and turned."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, q_weight: Tensor, k_weight: Tensor, heads: int, kv_heads: int,
        eps: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        qk, rstd = kernel.norm_rotate(qkv, cos, sin, q_weight, k_weight, heads, kv_heads, eps)
        ctx.save_for_backward(qkv, cos, sin, q_weight, k_weight, rstd)
        ctx.heads, ctx.kv_heads = heads, kv_heads
        return qk, qkv[:, qk.shape[1] :]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        qkv, cos, sin, q_weight, k_weight, rstd = ctx.saved_tensors
        dqk, dv = gradients
        dqkv = torch.empty_like(qkv)
        dqkv[:, dqk.shape[1] :] = dv
        dq, dk = kernel.norm_rotate_backward(
            dqk.contiguous(), qkv, cos, sin, q_weight, k_weight, rstd, dqkv, ctx.heads, ctx.kv_heads
        )
        return dqkv, None, None, dq.to(q_weight.dtype), dk.to(k_weight.dtype), None, None, None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.to(x.dtype).t()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor]:
        (g,) = gradients
        x, weight = ctx.saved_tensors
        return g @ weight.to(g.dtype), _weight_gradient(g, x, weight)


class _SwigluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, weight)
        return kernel.swiglu(gate_up) @ weight.to(gate_up.dtype).t()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor]:
        from stoker.training.model.swiglu_kernel import backward

        (g,) = gradients
        gate_up, weight = ctx.saved_tensors
        gradient, activations = backward(g @ weight.to(g.dtype), gate_up)
        return gradient, _weight_gradient(g, activations, weight)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor, scale: Tensor, eps: float) -> Tensor:
        out, normed, rstd = kernel.add_norm(x, delta, scale, eps)
        ctx.save_for_backward(out, rstd, scale)
        return normed

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        x, rstd, scale = ctx.saved_tensors
        dx, _, dscale = kernel.norm_backward(gradients[0].contiguous(), x, rstd, scale, None)
        return dx, dx, dscale.to(scale.dtype), None


def add_norm(x: Tensor, delta: Tensor, norm: Any) -> Tensor:
    """norm(x + delta) for x [B, T, D] and delta [B·T, D]."""
    normed: Tensor = _AddNorm.apply(x.view(-1, x.shape[-1]), delta, norm.weight, norm.eps)  # type: ignore[no-untyped-call]
    return normed.view_as(x)


def block(module: Any, x: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
    """Block.forward on rows [B·T, D]: (residual stream, what is still to be added to it)."""
    attention, mlp = module.attention, module.mlp
    heads, kv_heads, head_dim = attention.heads, attention.kv_heads, attention.head_dim
    B, T = x.shape[0], x.shape[1]
    rows = x.view(B * T, -1)
    first, second = module.attention_norm, module.mlp_norm
    if attention.q_norm is None:
        # products_kept: the product is used again in the backward pass, so another buffer is turned: nothing would
        # notice a kernel's writing into it.
        rows, q, k, v = _NormQkv.apply(  # type: ignore[no-untyped-call]
            rows, delta, first.weight, attention.qkv.weight, first.eps, cos, sin, heads, kv_heads, head_dim,
            module.products_kept,
        )  # fmt: skip
    else:
        rows, qkv = _NormLinear.apply(rows, delta, first.weight, attention.qkv.weight, first.eps)  # type: ignore[no-untyped-call]
        norms = attention.q_norm.weight, attention.k_norm.weight
        qk, v = _NormRotate.apply(qkv, cos, sin, *norms, heads, kv_heads, attention.q_norm.eps)  # type: ignore[no-untyped-call]
        q, k = torch.split(qk, [heads * head_dim, kv_heads * head_dim], dim=1)
    q, k, v = (part.view(B, T, -1, head_dim) for part in (q, k, v))
    y = attend(q, k, v, seen, attention.dropout if module.training else 0.0, attention.scale)
    out = module._drop(_Linear.apply(y.reshape(B * T, -1), attention.out.weight))  # type: ignore[no-untyped-call]
    rows, wide = _NormLinear.apply(rows, out, second.weight, mlp.gate_up.weight, second.eps)  # type: ignore[no-untyped-call]
    return rows.view(B, T, -1), module._drop(_SwigluLinear.apply(wide, mlp.down.weight))  # type: ignore[no-untyped-call]
