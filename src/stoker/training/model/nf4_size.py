"""How many bytes a weight takes in NF4 (model/nf4.py). No torch: the memory plan asks, too."""

from __future__ import annotations

import math
from collections.abc import Sequence

BLOCK, SECOND_BLOCK = 64, 256


def storable(size: Sequence[int]) -> bool:
    """Whether blocks end where the tensor does."""
    return len(size) == 2 and math.prod(size) % BLOCK == 0


def multipliable(inputs: int) -> bool:
    """Whether a token can be multiplied by the codes as they are: blocks lie within a row."""
    return inputs % BLOCK == 0


def tensor_bytes(elements: int) -> tuple[int, int, int, int]:
    """Of its four tensors: codes, scales, the scales' scales, and their mean."""
    blocks = -(-elements // BLOCK)
    return elements // 2, blocks, 4 * -(-blocks // SECOND_BLOCK), 4


def stored_bytes(elements: int) -> int:
    return sum(tensor_bytes(elements))
