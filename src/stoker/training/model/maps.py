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
from stoker.training.model.pieces import like

Learned = tuple[Tensor | None, ...]
Kept = tuple[Tensor | None, Tensor | None]


class Whole:
    """The layer's own weight and bias; either may be frozen."""

    def learned(self, layer: Any) -> Learned:
        return layer.weight, layer.bias

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(the layer's output, what `gradients` needs of this pass besides)."""
        w = weight.to(x.dtype).t()
        return x @ w if bias is None else torch.addmm(bias.to(x.dtype), x, w), None

    def back(self, g: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(gradient of x, what `gradients` needs of this pass besides)."""
        return g @ weight.to(g.dtype), None

    def gradients(self, g: Tensor, x: Tensor, kept: Kept, weight: Tensor, bias: Tensor | None) -> Learned:
        """`kept`: what `product` and `back` gave for this."""
        dbias = None
        if bias is not None and bias.requires_grad:
            dbias = g.sum(0, dtype=torch.float32).to(bias.dtype)
        return (weight_gradient(g, x, weight) if weight.requires_grad else None), dbias


def weight_gradient(g: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    if weight.dtype == torch.float32 and g.is_cuda and g.dtype != torch.float32:
        return torch.mm(g.t(), x, out_dtype=torch.float32)
    return (g.t() @ x).to(weight.dtype)


class Adapter(nn.Module):
    """Low-rank maps beside a layer's parts: part p adds scale · x Aₚᵀ Bₚᵀ to its rows. The A lie one below the other, and so
    do the B.
    """

    def __init__(self, inputs: int, outputs: int, parts: Sequence[tuple[int, int]], rank: int, scale: float) -> None:
        """`parts`: (first row, row behind the last) of each part that has one, of the layer's `outputs` rows."""
        super().__init__()
        self.parts, self.rank, self.scale, self.dropout = tuple(parts), rank, scale, 0.0
        self.outputs = outputs
        self.a = nn.Parameter(torch.empty(rank * len(parts), inputs))
        self.up = nn.Parameter(torch.empty(sum(end - begin for begin, end in parts), rank))
        self.sharded = False  # FSDP2 gathers what its optimizer step changed, and counts no version
        self._made: tuple[Tensor, Tensor] | None = None
        self._written: tuple[int, int] | None = None  # versions of what they hold

    @property
    def made(self) -> tuple[Tensor, Tensor] | None:
        """What `matrices` made last, in the place that it keeps."""
        return self._made

    @property
    def b(self) -> tuple[Tensor, ...]:
        """B of each part: rows of `up`."""
        return torch.split(self.up, [end - begin for begin, end in self.parts])

    @torch.no_grad()
    def start(self, generator: torch.Generator) -> None:
        """As peft does: A uniform, B zero, so that the model begins as it was."""
        bound = 1 / self.a.shape[1] ** 0.5
        drawn = torch.empty(self.a.shape, device="cpu").uniform_(-bound, bound, generator=generator)
        self.a.copy_(like(drawn.to(self.a.device), self.a))
        self.up.zero_()

    def matrices(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(A [R, inputs], B [outputs, R] with zeros where a part meets another's A), made once after each update: one
        product for all parts, and no cast in every pass.
        """
        if self._made is None or self._made[0].dtype != dtype or self._made[0].device != self.a.device:
            small = writable_later(self.a.shape, self.a.device, dtype)
            self._made = small, writable_later((self.outputs, len(self.a)), self.a.device, dtype).zero_()
            self._written = None
        versions = (self.a._version, self.up._version)
        if self._written != versions or self.sharded or _capturing(self.a):
            self.put(self._made, self.a.detach(), self.up.detach())
            self._written = versions
        return self._made

    def put(self, made: tuple[Tensor, Tensor], a: Tensor, up: Tensor) -> None:
        """Both, whole, into what `matrices` makes."""
        small, wide = made
        places = [
            wide[begin:end, place * self.rank : (place + 1) * self.rank]
            for place, (begin, end) in enumerate(self.parts)
        ]
        torch._foreach_copy_([small, *places], [a, *torch.split(up, [end - begin for begin, end in self.parts])])


def _capturing(tensor: Tensor) -> bool:
    """A replayed graph has to make its copies anew: the weights have moved since."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


class Adapted:
    """An adapter learns; the weight and the bias stay, in 16 or 4 bits."""

    def __init__(self, layer: Any, adapter: Adapter) -> None:
        self._layer, self._adapter = layer, adapter

    def learned(self, layer: Any) -> Learned:
        return self._adapter.a, self._adapter.up

    def product(self, x: Tensor, a: Tensor, up: Tensor) -> tuple[Tensor, Tensor | None]:
        small, wide = self._adapter.matrices(x.dtype)
        narrow = x @ small.t()  # [N, R]
        return _based(self._layer, x).addmm_(narrow, wide.t(), alpha=self._adapter.scale), narrow

    def back(self, g: Tensor, a: Tensor, up: Tensor) -> tuple[Tensor, Tensor | None]:
        small, wide = self._adapter.matrices(g.dtype)
        inner = torch.addmm(g.new_empty(()), g, wide, beta=0, alpha=self._adapter.scale)
        dx = g @ self._layer.matrix(g.dtype)
        return dx.addmm_(inner, small), inner

    def gradients(self, g: Tensor, x: Tensor, kept: Kept, a: Tensor, up: Tensor) -> Learned:
        narrow, inner = kept
        assert narrow is not None and inner is not None
        dup, begun = torch.empty_like(up), 0
        for place, (begin, end) in enumerate(self._adapter.parts):
            columns = narrow[:, place * self._adapter.rank : (place + 1) * self._adapter.rank]
            _scaled_gradient(g[:, begin:end], columns, self._adapter.scale, dup[begun : begun + end - begin])
            begun += end - begin
        return weight_gradient(inner, x, a), dup


def _scaled_gradient(g: Tensor, x: Tensor, scale: float, out: Tensor) -> None:
    if g.is_cuda and g.dtype != torch.float32:
        torch.addmm(out, g.t(), x, out_dtype=torch.float32, beta=0, alpha=scale, out=out)
    else:
        torch.mul(g.t() @ x, scale, out=out)


class Frozen:
    """Nothing learns, and the weight is not a parameter: 4 bits."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def learned(self, layer: Any) -> Learned:
        return ()

    def product(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return _based(self._layer, x), None

    def back(self, g: Tensor) -> tuple[Tensor, Tensor | None]:
        return g @ self._layer.matrix(g.dtype), None

    def gradients(self, g: Tensor, x: Tensor, kept: Kept) -> Learned:
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
        y, kept = kind.product(x, *learned)
        ctx.save_for_backward(x, kept, *learned)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        (g,) = gradients
        x, kept, *learned = ctx.saved_tensors
        g = g.contiguous()
        dx, inner = ctx.kind.back(g, *learned)
        return None, dx, *ctx.kind.gradients(g, x, (kept, inner), *learned)


def writable_later(size: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return uninitialized memory that is kept between passes.

    An engine generates in inference mode. A tensor that was made there can't be written to outside of it, as a training
    step or an evaluation in the same process does.
    """
    if not torch.is_inference_mode_enabled():
        return torch.empty(size, device=device, dtype=dtype)
    with torch.inference_mode(False):
        return torch.empty(size, device=device, dtype=dtype)


class Buffers:
    """Memory for one dequantized matrix per device and dtype, as large as the largest so far. The next one overwrites it:
    the GPU computes in order, so a product that was launched has read it.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self._in_graphs: dict[int, Tensor] = {}  # whose addresses a CUDA graph keeps

    def take(self, rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        held = self._held.get((device, dtype))
        if held is None or held.numel() < rows * columns:
            self._held.pop((device, dtype), None)  # before the larger one is made: never both
            held = self._held[device, dtype] = writable_later((rows * columns,), device, dtype)
        if _capturing(held):
            self._in_graphs[held.data_ptr()] = held
        return held[: rows * columns].view(rows, columns)


BUFFERS = Buffers()


def by_codes(groups: Sequence[nf4.Joined], x: Tensor) -> Tensor:
    """x [N, inputs] times the transposed weight. For one token on a GPU the weight is never made: that takes half the time.
    Already for two, looking up what codes mean takes longer than making the matrix once (H200).
    """
    if not x.is_cuda or len(x) > 1:
        return x @ dequantized(groups, x.dtype).t()
    y = x.new_empty(1, sum(group.size[0] for group in groups))
    begin = 0
    for group in groups:
        nf4.multiply(x.contiguous(), group, y[0, begin : begin + group.size[0]])
        begin += group.size[0]
    return y


def dequantized(groups: Sequence[nf4.Joined], dtype: torch.dtype) -> Tensor:
    """The parts one below the other, in a buffer that the next call overwrites."""
    rows, columns = sum(group.size[0] for group in groups), groups[0].size[1]
    whole = BUFFERS.take(rows, columns, groups[0].codes.device, dtype)
    begin = 0
    for group in groups:
        nf4.expand(group, whole[begin : begin + group.size[0]])
        begin += group.size[0]
    return whole
