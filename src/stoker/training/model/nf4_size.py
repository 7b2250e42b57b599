"""How many bytes a weight takes in NF4 (model/nf4.py), and what bitsandbytes stores of it. No torch: the memory plan asks, too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from stoker.contract.text import parse_json

BLOCK, SECOND_BLOCK = 64, 256
# Names that bitsandbytes gives what belongs to a weight in 4 bits.
NF4_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", "quant_state.bitsandbytes__nf4")
_MAX_FP32 = 3.4e38
DTYPES = ("bfloat16", "float16", "float32")  # that a weight had


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


def description(data: bytes) -> dict[str, Any]:
    """What bitsandbytes says of a weight. ValueError: it is none that is read here, and why."""
    try:
        about = parse_json(data)
    except ValueError as problem:
        raise ValueError(f"its description can't be read: {problem}") from problem
    if not isinstance(about, dict):
        raise ValueError("its description is not a JSON object")
    for key, value in {"quant_type": "nf4", "blocksize": BLOCK, "nested_blocksize": SECOND_BLOCK}.items():
        if about.get(key) != value:
            raise ValueError(f"{key} is {str(about.get(key))[:40]!r}, and {value!r} is what is read")
    size, offset, dtype = about.get("shape"), about.get("nested_offset"), about.get("dtype")
    if not isinstance(size, list) or len(size) != 2 or not all(type(n) is int and n > 0 for n in size):
        raise ValueError(f"shape is {str(size)[:40]!r}")
    is_number = isinstance(offset, (int, float)) and not isinstance(offset, bool) and abs(offset) < _MAX_FP32
    if not is_number or dtype not in DTYPES:
        raise ValueError(f"nested_offset is {str(offset)[:40]!r}, dtype {str(dtype)[:40]!r}")
    return about


def parts_of(elements: int) -> dict[str, tuple[str, int]]:
    """What bitsandbytes stores beside the codes, but for the description: the kind of numbers, and how many."""
    blocks = -(-elements // BLOCK)
    counts = (("U8", blocks), ("F32", 16), ("F32", -(-blocks // SECOND_BLOCK)), ("F32", 256))
    return dict(zip(NF4_PARTS, counts, strict=False))
