"""How many bits a weight has while answers are written: 16, or 4 (NF4) where that is all a GPU has memory for."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from stoker.contract.errors import EX_UNAVAILABLE, Refusal
from stoker.contract.units import format_bytes
from stoker.training.model.config import ModelConfig, tensors
from stoker.training.model.linear import Linear

Say = Callable[[str], None]
SPARE = 768 << 20  # bytes: a prompt's activations, logits, kernels and what the allocator rounds up


def needed(c: ModelConfig, rows: int, length: int) -> int:
    """Bytes of weights in 16 bits and of a cache for so many answers."""
    weights = 2 * sum(math.prod(size) for _, sizes in tensors(c) for size in sizes)
    return weights + 2 * c.layers * 2 * rows * c.kv_heads * length * c.head_dim + SPARE


def four(asked: str, c: ModelConfig, rows: int, length: int, device: torch.device, say: Say) -> bool:
    """Whether a folder's weights are to be opened in 4 bits. A choice that nobody asked for is reported."""
    if asked != "auto":
        return asked == "4"
    if device.type != "cuda":
        return False
    free = torch.cuda.mem_get_info(device)[0]
    if needed(c, rows, length) <= free:
        return False
    say(
        f"16-bit weights and a cache of {rows} × {length} tokens need {format_bytes(needed(c, rows, length))}, and {format_bytes(free)} are"
        " free on the GPU: loading the weights in 4 bits (NF4), which costs some quality"
    )
    return True


def refuse_outside(asked: str) -> None:
    if asked == "4":
        raise Refusal(
            "4 bits need a model of one of Stoker's families (`stoker docs families`); this one runs in transformers",
            EX_UNAVAILABLE,
        )


def coded(model: nn.Module) -> bool:
    """Whether weights of it have 4 bits."""
    return any(isinstance(module, Linear) and module.has_codes for module in model.modules())
