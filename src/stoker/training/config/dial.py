"""The depth dial: one number, the rest of the model's shape from it. What was given wins, and what follows from it
follows.
"""

from __future__ import annotations

from collections.abc import Collection

from stoker.contract.shape import replace
from stoker.training.model.config import ModelConfig

SHAPE = ("depth", "layers", "dim", "heads", "kv_heads", "head_dim", "ff")


def derive(model: ModelConfig, given: Collection[str]) -> ModelConfig:
    """Every number filled in. `given`: dotted keys that were asked for. head_dim stays 0 where no width fits: `check`
    says so.
    """
    may_be_zero = ("kv_heads", "head_dim", "ff")
    own = {name for name in SHAPE if f"model.{name}" in given and (getattr(model, name) or name not in may_be_zero)}
    dial = model.depth > 0
    layers = model.layers if "layers" in own or not dial else model.depth
    dim = model.dim if "dim" in own or not dial else round_up(64 * model.depth, 128)
    heads = model.heads if "heads" in own or (not dial and "dim" not in own) else 0
    head_dim = model.head_dim if "head_dim" in own else _head_dim(dim, heads)
    if not heads and "heads" not in own:
        heads = max(dim // head_dim, 1) if head_dim > 0 else 1
    if "kv_heads" in own:
        kv_heads = model.kv_heads
    else:  # a zero that was asked for means no sharing, as without the dial
        shared = dial and "model.kv_heads" not in given and heads >= 16 and heads % 4 == 0
        kv_heads = heads // 4 if shared else heads
    ff = model.ff if "ff" in own else round_up(-(-8 * dim // 3), 64)
    return replace(model, layers=layers, dim=dim, heads=heads, kv_heads=kv_heads, head_dim=head_dim, ff=ff)


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _head_dim(dim: int, heads: int) -> int:
    if heads:
        return dim // heads if dim % heads == 0 else 0
    # 128 is what the attention kernels like best; below a width of 1024 it leaves too few heads
    widest = 128 if dim >= 1024 else 64
    return next((width for width in range(widest, 1, -2) if dim % width == 0), 0)
