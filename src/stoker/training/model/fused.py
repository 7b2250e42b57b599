"""A block without a compiler: products by cuBLAS, attention by cuDNN, the rest by six kernels of our own or plain torch.

Kept for the backward pass: the residual stream before each norm, queries, keys, values, what attention and the wide
product made. Norms and SwiGLU's activations are made again. The first step comes after seconds: nothing is traced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stoker.training.model import fused_kernel as kernel
from stoker.training.model.attention import Seen, attend
from stoker.training.model.maps import Map, Mapped


class _NormLinear(torch.autograd.Function):
    """(x + delta, norm(x + delta) through a linear layer's map)."""

    @staticmethod
    def forward(
        ctx: Any, kind: Map, x: Tensor, delta: Tensor | None, scale: Tensor, eps: float, *learned: Tensor
    ) -> tuple[Tensor, Tensor]:
        out, normed, rstd = kernel.add_norm(x, delta, scale, eps)
        y, kept = kind.product(normed, *learned)
        ctx.save_for_backward(out, rstd, scale, kept, *learned)
        ctx.kind, ctx.added = kind, delta is not None
        return (out if delta is not None else x.view_as(x)), y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        onward, g = gradients
        x, rstd, scale, kept, *learned = ctx.saved_tensors
        inner, more = ctx.kind.back(g, *learned)
        dx, normed, dscale = kernel.norm_backward(inner, x, rstd, scale, onward)
        own = ctx.kind.gradients(g, normed, (kept, more), *learned)
        return None, dx, dx if ctx.added else None, dscale.to(scale.dtype), None, *own


class _NormQkv(torch.autograd.Function):
    """(x + delta, queries, keys, values): norm, product and rotation; the three are parts of one buffer."""

    @staticmethod
    def forward(
        ctx: Any, kind: Map, x: Tensor, delta: Tensor | None, scale: Tensor, eps: float, cos: Tensor, sin: Tensor,
        heads: tuple[int, int, int], fresh: bool, *learned: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        queries, keys, head_dim = heads
        out, normed, rstd = kernel.add_norm(x, delta, scale, eps)
        qkv, kept = kind.product(normed, *learned)
        if fresh:
            qkv = qkv.clone()
        kernel.rotate_in_place(qkv, cos, sin, queries + keys, head_dim, 1.0)
        ctx.save_for_backward(out, rstd, scale, cos, sin, kept, *learned)
        ctx.kind, ctx.added, ctx.heads = kind, delta is not None, heads
        q, k, v = torch.split(qkv, [queries * head_dim, keys * head_dim, keys * head_dim], dim=1)
        return (out if delta is not None else x.view_as(x)), q, k, v

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        onward, dq, dk, dv = gradients
        x, rstd, scale, cos, sin, kept, *learned = ctx.saved_tensors
        queries, keys, head_dim = ctx.heads
        g = torch.cat([dq, dk, dv], dim=1)
        kernel.rotate_in_place(g, cos, sin, queries + keys, head_dim, -1.0)
        inner, more = ctx.kind.back(g, *learned)
        dx, normed, dscale = kernel.norm_backward(inner, x, rstd, scale, onward)
        own = ctx.kind.gradients(g, normed, (kept, more), *learned)
        return None, dx, dx if ctx.added else None, dscale.to(scale.dtype), *(None,) * 5, *own


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


class _SwigluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kind: Map, gate_up: Tensor, *learned: Tensor) -> Tensor:
        ctx.kind = kind
        y, kept = kind.product(kernel.swiglu(gate_up), *learned)
        ctx.save_for_backward(gate_up, kept, *learned)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        (g,) = gradients
        gate_up, kept, *learned = ctx.saved_tensors
        inner, more = ctx.kind.back(g, *learned)
        gradient, activations = kernel.swiglu_backward(inner, gate_up)
        return None, gradient, *ctx.kind.gradients(g, activations, (kept, more), *learned)


class _LeanMlp(torch.autograd.Function):
    """(x + delta, its norm through both maps of a SwiGLU), where the wide product between them is not kept but made again: half
    of what a block keeps, for a third of its forward pass or less."""

    @staticmethod
    def forward(
        ctx: Any, kinds: tuple[Map, Map, int], x: Tensor, delta: Tensor, scale: Tensor, eps: float, *learned: Tensor
    ) -> tuple[Tensor, Tensor]:
        up, down, first = kinds
        out, normed, rstd = kernel.add_norm(x, delta, scale, eps)
        wide = up.product(normed, *learned[:first])[0]
        del normed
        inner = kernel.swiglu(wide)
        del wide
        y, kept = down.product(inner, *learned[first:])
        ctx.save_for_backward(out, rstd, scale, kept, *learned)
        ctx.kinds, ctx.eps = kinds, eps
        return out, y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        onward, g = gradients
        x, rstd, scale, kept, *learned = ctx.saved_tensors
        up, down, first = ctx.kinds
        wide, narrow = up.product(kernel.add_norm(x, None, scale, ctx.eps)[1], *learned[:first])
        inner, more = down.back(g, *learned[first:])
        gradient, activations = kernel.swiglu_backward(inner, wide)
        del inner, wide
        of_down = down.gradients(g, activations, (kept, more), *learned[first:])
        del activations, more
        inner, more = up.back(gradient, *learned[:first])
        dx, normed, dscale = kernel.norm_backward(inner, x, rstd, scale, onward)
        of_up = up.gradients(gradient, normed, (narrow, more), *learned[:first])
        return None, dx, dx, dscale.to(scale.dtype), None, *of_up, *of_down


class _Norm(torch.autograd.Function):
    """(x + delta, its norm)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor | None, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        out, normed, rstd = kernel.add_norm(x, delta, scale, eps)
        ctx.save_for_backward(out, rstd, scale)
        ctx.added = delta is not None
        ctx.set_materialize_grads(False)
        return (out if delta is not None else x.view_as(x)), normed

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        onward, g = gradients
        x, rstd, scale = ctx.saved_tensors
        dx, _, dscale = kernel.norm_backward(g.contiguous(), x, rstd, scale, onward)
        return dx, dx if ctx.added else None, dscale.to(scale.dtype), None


def _scale(norm: Any) -> Tensor:
    """What a norm multiplies by."""
    scale: Tensor = norm.weight.float() + norm.offset if norm.offset else norm.weight
    return scale


def add_norm(x: Tensor, delta: Tensor, norm: Any) -> Tensor:
    """norm(x + delta) for x [B, T, D] and delta [B·T, D]."""
    normed: Tensor = _Norm.apply(x.view(-1, x.shape[-1]), delta, _scale(norm), norm.eps)[1]  # type: ignore[no-untyped-call]
    return normed.view_as(x)


def block(
    module: Any, x: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor, seen: Seen, counted: Tensor | None
) -> tuple[Tensor, ...]:
    """Block.forward on rows [B·T, D]: (residual stream, what is still to be added to it); with experts their load behind."""
    attention = module.attention
    heads, kv_heads, head_dim = attention.heads, attention.kv_heads, attention.head_dim
    B, T = x.shape[0], x.shape[1]
    rows = x.view(B * T, -1)
    first = module.attention_norm
    qkv_map, qkv_learned = attention.qkv.map, attention.qkv.map.learned(attention.qkv)
    if attention.q_norm is None:
        # products_kept: the product is used again in the backward pass, so another buffer is turned: nothing would
        # notice a kernel's writing into it.
        rows, q, k, v = _NormQkv.apply(  # type: ignore[no-untyped-call]
            qkv_map, rows, delta, _scale(first), first.eps, cos, sin, (heads, kv_heads, head_dim), module.products_kept,
            *qkv_learned,
        )  # fmt: skip
    else:
        rows, qkv = _NormLinear.apply(qkv_map, rows, delta, _scale(first), first.eps, *qkv_learned)  # type: ignore[no-untyped-call]
        norms = _scale(attention.q_norm), _scale(attention.k_norm)
        qk, v = _NormRotate.apply(qkv, cos, sin, *norms, heads, kv_heads, attention.q_norm.eps)  # type: ignore[no-untyped-call]
        q, k = torch.split(qk, [heads * head_dim, kv_heads * head_dim], dim=1)
    q, k, v = (part.view(B, T, -1, head_dim) for part in (q, k, v))
    y = attend(q, k, v, seen, attention.dropout if module.training else 0.0, attention.scale)
    out = _through(attention.out, y.reshape(B * T, -1))
    rows, out, *load = _mlp(module, rows, module._drop(_after(out, module.attention_post_norm)), (B, T), counted)
    return rows.view(B, T, -1), module._drop(_after(out, module.mlp_post_norm)), *load


def _after(x: Tensor, norm: Any) -> Tensor:
    """Where the block has a norm behind attention or MLP."""
    if norm is None:
        return x
    normed: Tensor = _Norm.apply(x, None, _scale(norm), norm.eps)[1]  # type: ignore[no-untyped-call]
    return normed


def _mlp(module: Any, rows: Tensor, delta: Tensor, size: tuple[int, int], counted: Tensor | None) -> tuple[Tensor, ...]:
    """(rows + delta, what the MLP or the experts make of its norm), with experts their load."""
    norm, mlp = module.mlp_norm, module.mlp
    if mlp is None:
        rows, normed = _Norm.apply(rows, delta, _scale(norm), norm.eps)  # type: ignore[no-untyped-call]
        y, load = module.experts(normed.view(*size, -1), counted)
        return rows, y.flatten(0, 1), load
    wide_map = mlp.gate_up.map
    if module.lean:
        up, down = wide_map.learned(mlp.gate_up), mlp.down.map.learned(mlp.down)
        kinds = wide_map, mlp.down.map, len(up)
        return _LeanMlp.apply(kinds, rows, delta, _scale(norm), norm.eps, *up, *down)  # type: ignore[no-untyped-call, no-any-return]
    rows, wide = _NormLinear.apply(wide_map, rows, delta, _scale(norm), norm.eps, *wide_map.learned(mlp.gate_up))  # type: ignore[no-untyped-call]
    if mlp.activation is None:
        return rows, _SwigluLinear.apply(mlp.down.map, wide, *mlp.down.map.learned(mlp.down))  # type: ignore[no-untyped-call]
    return rows, _through(mlp.down, mlp.activation(wide))


def _through(layer: Any, x: Tensor) -> Tensor:
    found: Tensor = Mapped.apply(layer.map, x, *layer.map.learned(layer))  # type: ignore[no-untyped-call]
    return found
