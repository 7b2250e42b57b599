"""Products of the block whose weights are cast where they are used, and the MLP made of two of them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from stoker.training.model.config import ModelConfig
from stoker.training.model.fp8 import fp8_linear
from stoker.training.model.rows import gate_up_rows
from stoker.training.model.swiglu import activation, swiglu_linear


class Linear(nn.Linear):
    """The weight is cast to the activations' dtype: fp32 master, bf16 product. `parts`: rows of the maps joined in it."""

    def __init__(self, inputs: int, *parts: int, bias: bool = False) -> None:
        super().__init__(inputs, sum(parts), bias=bias)
        self.parts = parts
        self.fp8 = False

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if self.fp8:
            product = fp8_linear(x, self.weight)
            return product if bias is None else product + bias
        return F.linear(x, self.weight.to(x.dtype), bias)


class MLP(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.gate_up = Linear(c.dim, *gate_up_rows(c, c.ff), bias=c.mlp_bias)
        self.down = Linear(c.ff, c.dim, bias=c.mlp_bias)
        self.activation = None if (c.activation, c.gated, c.mlp_bias) == ("silu", True, False) else activation(c)

    def forward(self, x: Tensor) -> Tensor:
        if self.activation is None:
            return swiglu_linear(self.gate_up(x), self.down.weight, self.down.fp8)
        out: Tensor = self.down(self.activation(self.gate_up(x)))
        return out
