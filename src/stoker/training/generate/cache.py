"""Keys and values of a batch, in one block of memory whose shape never changes.

A row is its prompt from slot 0, a hole up to the longest prompt's end, then the answer, which begins at the same slot
in all rows: a decoding step is one shape and writes one slot. The prompt's own pass needs no mask (causal attention
never looks at what pads the end), as padding in front would.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.training.model.config import ModelConfig


class Cache:
    def __init__(self, c: ModelConfig, rows: int, length: int, dtype: torch.dtype, device: torch.device) -> None:
        # Zeros: a slot that nobody wrote is multiplied by 0, and what happens to lie in fresh memory may be NaN.
        self.kv = torch.zeros(c.layers, 2, rows, c.kv_heads, length, c.head_dim, dtype=dtype, device=device)
        self.length = length

    def keep(self, rows: Tensor, slots: int) -> None:
        """These rows move to the front, in their order."""
        self.kv[:, :, : len(rows), :, :slots] = self.kv[:, :, rows, :, :slots]


def holes(lengths: Tensor, answers_from: int, slots: int, dtype: torch.dtype) -> Tensor:
    """[rows, 1, 1, slots]: 0 where there is a token or will be one, -inf in a row's hole."""
    slot = torch.arange(slots, device=lengths.device)
    seen = (slot < lengths[:, None]) | (slot >= answers_from)
    return torch.zeros(seen.shape, dtype=dtype, device=lengths.device).masked_fill_(~seen, float("-inf"))[
        :, None, None, :
    ]
