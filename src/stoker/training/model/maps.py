"""What a linear layer multiplies by, and who learns: its own weight, or an adapter beside a frozen one.

The executions of the block (plain, fused) make three products with a layer: forward, of the gradient of its output, and
of its parameters' gradients. Each takes the tensors that learn as arguments, so that autograd hands out their gradients.
A frozen weight costs no gradient. Names of shapes: N tokens, R ranks of all parts' adapters together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stoker.training.model import nf4

Learned = tuple[Tensor | None, ...]


class Whole:
    """The layer's own weight and bias; either may be frozen."""

    def learned(self, layer: Any) -> Learned:
        return layer.weight, layer.bias

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        w = weight.to(x.dtype).t()
        return x @ w if bias is None else torch.addmm(bias.to(x.dtype), x, w)

    def back(self, g: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(gradient of x, what `gradients` needs besides)."""
        return g @ weight.to(g.dtype), None

    def gradients(self, g: Tensor, x: Tensor, kept: Tensor | None, weight: Tensor, bias: Tensor | None) -> Learned:
        dbias = None
        if bias is not None and bias.requires_grad:
            dbias = g.sum(0, dtype=torch.float32).to(bias.dtype)
        return (weight_gradient(g, x, weight) if weight.requires_grad else None), dbias


def weight_gradient(g: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    if weight.dtype == torch.float32 and g.is_cuda and g.dtype != torch.float32:
        return torch.mm(g.t(), x, out_dtype=torch.float32)
    return (g.t() @ x).to(weight.dtype)


class Adapter(nn.Module):
    """Low-rank maps beside a layer's parts: part p adds scale · x Aₚᵀ Bₚᵀ to its rows. The A lie one below the other."""

    def __init__(self, inputs: int, parts: Sequence[tuple[int, int]], rank: int, scale: float) -> None:
        """`parts`: (first row, row behind the last) of each part that has one."""
        super().__init__()
        self.parts, self.rank, self.scale, self.dropout = tuple(parts), rank, scale, 0.0
        self.a = nn.Parameter(torch.empty(rank * len(parts), inputs))
        self.b = nn.ParameterList(torch.empty(end - begin, rank) for begin, end in parts)

    @torch.no_grad()
    def start(self, generator: torch.Generator) -> None:
        """As peft does: A uniform, B zero, so that the model begins as it was."""
        bound = 1 / self.a.shape[1] ** 0.5
        self.a.uniform_(-bound, bound, generator=generator)
        for b in self.b:
            b.zero_()


class Adapted:
    """An adapter learns; the weight and the bias stay, in 16 or 4 bits."""

    def __init__(self, layer: Any, adapter: Adapter) -> None:
        self._layer, self._adapter = layer, adapter

    def learned(self, layer: Any) -> Learned:
        return self._adapter.a, *self._adapter.b

    def product(self, x: Tensor, a: Tensor, *b: Tensor) -> Tensor:
        y = _based(self._layer, x)
        self._add(y, self._narrow(x, a), b)
        return y

    def _narrow(self, x: Tensor, a: Tensor) -> Tensor:
        """[N, R]"""
        return (x @ a.to(x.dtype).t()) * self._adapter.scale

    def _add(self, y: Tensor, narrow: Tensor, b: Sequence[Tensor]) -> None:
        rank = self._adapter.rank
        for place, ((begin, end), matrix) in enumerate(zip(self._adapter.parts, b, strict=True)):
            y[:, begin:end].addmm_(narrow[:, place * rank : (place + 1) * rank], matrix.to(y.dtype).t())

    def back(self, g: Tensor, a: Tensor, *b: Tensor) -> tuple[Tensor, Tensor | None]:
        pieces = [
            g[:, begin:end] @ matrix.to(g.dtype) for (begin, end), matrix in zip(self._adapter.parts, b, strict=True)
        ]
        narrow = torch.cat(pieces, dim=1) * self._adapter.scale
        dx = g @ self._layer.matrix(g.dtype)
        return dx.addmm_(narrow, a.to(g.dtype)), narrow

    def gradients(self, g: Tensor, x: Tensor, kept: Tensor | None, a: Tensor, *b: Tensor) -> Learned:
        assert kept is not None
        narrow, rank = self._narrow(x, a), self._adapter.rank
        found = [
            weight_gradient(g[:, begin:end], narrow[:, place * rank : (place + 1) * rank], matrix)
            for place, ((begin, end), matrix) in enumerate(zip(self._adapter.parts, b, strict=True))
        ]
        return weight_gradient(kept, x, a), *found


class Frozen:
    """Nothing learns, and the weight is not a parameter: 4 bits."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def learned(self, layer: Any) -> Learned:
        return ()

    def product(self, x: Tensor) -> Tensor:
        return _based(self._layer, x)

    def back(self, g: Tensor) -> tuple[Tensor, Tensor | None]:
        return g @ self._layer.matrix(g.dtype), None

    def gradients(self, g: Tensor, x: Tensor, kept: Tensor | None) -> Learned:
        return ()


def _based(layer: Any, x: Tensor) -> Tensor:
    w = layer.matrix(x.dtype).t()
    return x @ w if layer.bias is None else torch.addmm(layer.bias.to(x.dtype), x, w)


Map = Whole | Adapted | Frozen


class Mapped(torch.autograd.Function):
    """x [N, inputs] through a map."""

    @staticmethod
    def forward(ctx: Any, kind: Map, x: Tensor, *learned: Tensor) -> Tensor:
        ctx.kind = kind
        ctx.save_for_backward(x, *learned)
        return kind.product(x, *learned)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        (g,) = gradients
        x, *learned = ctx.saved_tensors
        g = g.contiguous()
        dx, kept = ctx.kind.back(g, *learned)
        return None, dx, *ctx.kind.gradients(g, x, kept, *learned)


class Buffers:
    """Memory for one dequantized matrix per device and dtype, as large as the largest so far. The next one overwrites it:
    the GPU computes in order, so a product that was launched has read it.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def take(self, rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        held = self._held.get((device, dtype))
        if held is None or held.numel() < rows * columns:
            self._held.pop((device, dtype), None)  # before the larger one is made: never both
            held = self._held[device, dtype] = torch.empty(rows * columns, device=device, dtype=dtype)
        return held[: rows * columns].view(rows, columns)


BUFFERS = Buffers()


def dequantized(parts: Sequence[nf4.Quantized], dtype: torch.dtype) -> Tensor:
    """The parts one below the other, in a buffer that the next call overwrites."""
    rows, columns = sum(part.size[0] for part in parts), parts[0].size[1]
    whole = BUFFERS.take(rows, columns, parts[0].codes.device, dtype)
    begin = 0
    for part in parts:
        nf4.dequantize(part, whole[begin : begin + part.size[0]])
        begin += part.size[0]
    return whole
