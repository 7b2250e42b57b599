"""The decoder's weights as generation reads them: matrices in the activations' dtype, cast once per update and not once
per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.contract.names import EX_UNAVAILABLE, Refusal
from stoker.contract.shape import shape
from stoker.training.model.decoder import Block, Decoder


@shape
class Layer:
    attention_norm: Tensor
    qkv: Tensor
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]: each head's row, so that queries and keys are one product
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Weights:
    """Where a parameter has the wanted dtype already (fp32 on CPUs) it is used itself. Copies stay where they are: CUDA
    graphs keep addresses.
    """

    def __init__(self, model: Decoder, vocab: int) -> None:
        if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
            raise Refusal(
                "a sharded model (FSDP) can't generate: use parallel.strategy ddp for stages that write answers",
                EX_UNAVAILABLE,
            )
        self._model, self._vocab = model, vocab
        self._take()

    @torch.no_grad()
    def _take(self) -> None:
        model, dtype = self._model, self._model.dtype
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._shared: list[tuple[Tensor, Tensor]] = []
        self.eps = model.config.norm_eps
        self.embed = self._matrix(model.embed.weight, dtype)
        head = self.embed if model.head is None else self._matrix(model.head.weight, dtype)
        self.head = head[: self._vocab]
        self.norm = self._matrix(model.norm.weight, torch.float32)
        self.layers = [self._layer(block, dtype) for block in model.layers if isinstance(block, Block)]
        self.refresh()

    def _matrix(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        if parameter.dtype == dtype and parameter.is_contiguous():
            self._shared.append((parameter.detach(), parameter))
            return self._shared[-1][0]
        self._copies.append(
            (torch.empty_like(parameter, dtype=dtype, memory_format=torch.contiguous_format), parameter)
        )
        return self._copies[-1][0]

    def _layer(self, block: Block, dtype: torch.dtype) -> Layer:
        attention, mlp = block.attention, block.mlp
        qk_norm = None
        if attention.q_norm is not None and attention.k_norm is not None:
            qk_norm = torch.empty(
                attention.heads + attention.kv_heads, attention.head_dim, device=attention.q_norm.weight.device
            )
            self._copies.append((qk_norm[: attention.heads], attention.q_norm.weight))
            self._copies.append((qk_norm[attention.heads :], attention.k_norm.weight))
        return Layer(
            self._matrix(block.attention_norm.weight, torch.float32),
            self._matrix(attention.qkv.weight, dtype),
            qk_norm,
            self._matrix(attention.out.weight, dtype),
            self._matrix(block.mlp_norm.weight, torch.float32),
            self._matrix(mlp.gate_up.weight, dtype),
            self._matrix(mlp.down.weight, dtype),
        )

    @torch.no_grad()
    def refresh(self) -> bool:
        """After the parameters changed. False: some lie elsewhere now, and what kept an address must forget it."""
        if any(ours.data_ptr() != parameter.data_ptr() for ours, parameter in self._shared):
            self._take()
            return False
        for ours, parameter in self._copies:
            ours.copy_(parameter)
        return True
