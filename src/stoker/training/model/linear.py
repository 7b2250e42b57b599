"""The layers of a block: norms, activations, and products whose weights are cast where they are used."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stoker.training.model import nf4
from stoker.training.model.config import ModelConfig, gate_up_rows
from stoker.training.model.maps import Adapted, Adapter, Frozen, Map, Mapped, Whole, by_codes, dequantized
from stoker.training.model.nf4_shards import Codes
from stoker.training.model.nf4_size import multipliable
from stoker.training.model.pieces import whole


def rms_norm(wide: Tensor, weight: Tensor, eps: float) -> Tensor:
    """fp32 in and out; who calls it rounds once. Trainer and generator share it: another rounding of queries and keys
    in one of them would make other tokens likely than those that were learned.
    """
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight


class RMSNorm(nn.Module):
    def __init__(self, dim: int, c: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps, self.offset = c.norm_eps, c.norm_offset

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.float()
        if self.offset:
            weight = self.offset + weight
        return rms_norm(x.float(), weight, self.eps).to(x.dtype)


class LayerNorm(nn.Module):
    def __init__(self, dim: int, c: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.eps, self.offset = c.norm_eps, c.norm_offset

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.float() + self.offset if self.offset else self.weight.float()
        return F.layer_norm(x.float(), x.shape[-1:], weight, self.bias.float(), self.eps).to(x.dtype)


def norm_of(dim: int, c: ModelConfig) -> RMSNorm | LayerNorm:
    return LayerNorm(dim, c) if c.norm_kind == "layer" else RMSNorm(dim, c)


_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


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
    x_scale, w_scale = _scale(x, _E4M3), _scale(weight, _E4M3)
    return _product(_cast(x, x_scale, _E4M3), x_scale, _cast(weight, w_scale, _E4M3).t(), w_scale, x.dtype, True)


def input_product(g: Tensor, weight: Tensor, fp8: bool) -> Tensor:
    """g w: the gradient of x."""
    if not fp8:
        return g @ weight.to(g.dtype)
    g_scale, w_scale = _scale(g, _E5M2), _scale(weight, _E4M3)
    column_major = _cast(weight.t(), w_scale, _E4M3).contiguous().t()
    return _product(_cast(g, g_scale, _E5M2), g_scale, column_major, w_scale, g.dtype, False)


class _Fp8(torch.autograd.Function):
    """One scale per tensor, found anew for each product. The weight's gradient stays in bf16: it would need both operands
    transposed in memory, and has to add up small numbers over all tokens.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return output_product(x, weight, True)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor | None]:
        (g,) = gradients
        x, weight = ctx.saved_tensors
        return input_product(g, weight, True), (g.t() @ x).to(weight.dtype) if weight.requires_grad else None


def fp8_linear(x: Tensor, weight: Tensor) -> Tensor:
    flat: Tensor = _Fp8.apply(x.flatten(0, -2), weight)  # type: ignore[no-untyped-call]
    return flat.view(*x.shape[:-1], -1)


def fits_fp8(inputs: int, outputs: int) -> bool:
    """The hardware takes multiples of 16 only; below 1024 the casts cost more than the product saves."""
    return inputs % 16 == 0 and outputs % 16 == 0 and min(inputs, outputs) >= 1024


def has_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}  # fmt: skip


def activation(c: ModelConfig) -> Callable[[Tensor], Tensor]:
    """What the MLP makes of its wide product, in plain torch."""
    of = _ACTIVATIONS[c.activation]

    def gated(wide: Tensor) -> Tensor:
        gate, up = wide.chunk(2, dim=-1)
        return (of(gate.float()) * up.float()).to(wide.dtype)

    return gated if c.gated else lambda wide: of(wide.float()).to(wide.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate.float()) * up.float()).to(gate_up.dtype)


def _backward(g: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of gate_up, silu(gate) · up)."""
    if g.is_cuda:
        from stoker.training.model.fused_kernel import swiglu_backward  # Triton: on GPUs only

        return swiglu_backward(g, gate_up)
    gate, up = (half.float() for half in gate_up.chunk(2, dim=-1))
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    wide = g.float()
    gradient = torch.cat([wide * up * (sigmoid + silu * (1 - sigmoid)), wide * silu], dim=-1)
    return gradient.to(gate_up.dtype), (silu * up).to(gate_up.dtype)


class _SwigluLinear(torch.autograd.Function):
    """The activations in between, the widest of a block, are not kept. On GPUs one kernel of our own makes them again with
    both gradients: compiled torch takes twice the time (0.65 ms against 0.33 ms, 2048 wide with 8192 between, H200).
    """

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor, fp8: bool) -> Tensor:
        ctx.save_for_backward(gate_up, weight)
        ctx.fp8 = fp8
        return output_product(swiglu(gate_up), weight, fp8)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        (g,) = gradients
        gate_up, weight = ctx.saved_tensors
        inner = input_product(g, weight, ctx.fp8)
        gradient, activations = _backward(inner, gate_up)
        return gradient, (g.t() @ activations).to(weight.dtype) if weight.requires_grad else None, None


def swiglu_linear(gate_up: Tensor, weight: Tensor, fp8: bool) -> Tensor:
    """(silu(gate) · up) weightᵀ for gate_up [..., 2F] and weight [D, F]."""
    flat: Tensor = _SwigluLinear.apply(gate_up.flatten(0, -2), weight, fp8)  # type: ignore[no-untyped-call]
    return flat.view(*gate_up.shape[:-1], -1)


class _Same(torch.autograd.Function):
    """x itself, and for autograd no view of it: FSDP2 warns of views."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        (g,) = gradients
        found: Tensor = g
        return found


class Linear(nn.Linear):
    """The weight is cast to the activations' dtype: fp32 master, bf16 product. `parts`: rows of the maps joined in it."""

    def __init__(self, inputs: int, *parts: int, bias: bool = False) -> None:
        super().__init__(inputs, sum(parts), bias=bias)
        self.parts = parts
        self.fp8 = False
        self.adapter: Adapter | None = None
        self.quantized: tuple[nf4.Quantized, ...] = ()  # instead of the weight
        self._joined: tuple[nf4.Joined, ...] = ()  # the same
        self.cut: Codes | None = None  # the same, in shards
        self.map: Map = Whole()

    def reset_parameters(self) -> None:
        """Nothing: `Decoder.start` or a folder has the numbers. Sampling some on the meta device imports the compiler, seconds."""

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """The weight in this dtype; a quantized one in a buffer that the next call overwrites."""
        codes = self._joined if self.cut is None else self.cut.joined()
        return dequantized(codes, dtype) if codes else self.weight.to(dtype)

    def whole_matrix(self, dtype: torch.dtype) -> Tensor:
        """The same of a weight that may be in shards; all ranks ask for it."""
        if self.cut is not None:
            return dequantized(self.cut.joined(whole), dtype)
        return self.matrix(dtype) if self._joined else whole(self.weight).to(dtype)

    @property
    def has_codes(self) -> bool:
        return bool(self.quantized) or self.cut is not None

    @property
    def has_rows_of_codes(self) -> bool:
        """Whether `by_codes` works."""
        return self.has_codes and multipliable(self.in_features)

    def by_codes(self, x: Tensor) -> Tensor:
        """A quantized weight's product with x [N, inputs], without bias, adapter and gradient."""
        return by_codes(self._joined, x)

    def entered(self, x: Tensor) -> Tensor:
        """x, before somebody multiplies it by the weight himself: where FSDP2 gathers the weight (parallel/sharded.py)."""
        if not hasattr(self, "reshard"):  # no unit of FSDP2
            return x
        same: Tensor = _Same.apply(x)  # type: ignore[no-untyped-call]
        return same

    def settle(self) -> None:
        """After an adapter was put beside the weight, or codes in its place."""
        self._joined, self.quantized = nf4.join(self.quantized) if self.quantized else ((), ())
        if self.adapter is not None:
            self.map = Adapted(self, self.adapter)
        else:
            self.map = Frozen(self) if self.has_codes else Whole()

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(self.map, Whole):
            if self.adapter is not None and self.adapter.dropout and self.training:
                return self._with_dropout(x)
            flat: Tensor = Mapped.apply(self.map, x.flatten(0, -2), *self.map.learned(self))  # type: ignore[no-untyped-call]
            return flat.view(*x.shape[:-1], -1)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if self.fp8:
            product = fp8_linear(x, self.weight)
            return product if bias is None else product + bias
        return F.linear(x, self.weight.to(x.dtype), bias)

    def _with_dropout(self, x: Tensor) -> Tensor:
        """What the adapter reads has places dropped; the frozen weight reads all."""
        adapter = self.adapter
        assert adapter is not None
        y: Tensor = Mapped.apply(Frozen(self), x.flatten(0, -2))  # type: ignore[no-untyped-call]
        dropped = F.dropout(x.flatten(0, -2), adapter.dropout)
        narrow = F.linear(dropped, adapter.a.to(x.dtype)) * adapter.scale
        added = torch.zeros_like(y)
        for (begin, end), piece, b in zip(
            adapter.parts, torch.split(narrow, adapter.rank, dim=1), adapter.b, strict=True
        ):
            added[:, begin:end] = F.linear(piece, b.to(x.dtype))
        return (y + added).view(*x.shape[:-1], -1)


class MLP(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.gate_up = Linear(c.dim, *gate_up_rows(c, c.ff), bias=c.mlp_bias)
        self.down = Linear(c.ff, c.dim, bias=c.mlp_bias)
        self.activation = None if (c.activation, c.gated, c.mlp_bias) == ("silu", True, False) else activation(c)

    def forward(self, x: Tensor) -> Tensor:
        if self.activation is None and isinstance(self.down.map, Whole):
            return swiglu_linear(self.gate_up(x), self.down.weight, self.down.fp8)
        activate = self.activation or swiglu
        out: Tensor = self.down(activate(self.gate_up(x)))
        return out
