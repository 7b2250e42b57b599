"""What a dispatched operation reads and writes, from its schema."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from stoker.contract.shape import shape

VIEW = "view"  # no new values
UNFILLED = "unfilled"  # memory as it was found: a NaN there means nothing
CARRIER = "carrier"  # between ranks, perhaps still under way: what went in is what comes out
COMPUTES = "computes"

_UNFILLED = (
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "new_empty_strided",
    "empty_permuted",
    "resize_",
    "_resize_output_",
    "set_",
)
_OVERWRITES = (
    "copy_",
    "fill_",
    "zero_",
    "normal_",
    "uniform_",
    "bernoulli_",
    "random_",
    "exponential_",
    "_foreach_copy_",
    "_foreach_zero_",
)
# The statistics that attention keeps for its backward are infinite, or never written, where a row is masked or padded.
_ATTENTION_SCRATCH = (
    "logsumexp",
    "softmax_lse",
    "max_logits",
    "attn_bias",
    "attn_mask",
    "philox_seed",
    "philox_offset",
    "cum_seq_q",
    "cum_seq_k",
)


@shape
class Operation:
    name: str  # aten.bmm
    kind: str
    arguments: tuple[str, ...]
    unread: frozenset[str]  # arguments whose values don't count as inputs
    written: tuple[str, ...]
    first_output_only: bool


@cache
def operation(function: Any) -> Operation:
    schema = function._schema
    space, _, name = schema.name.partition("::")
    attention = "attention" in name
    written = tuple(one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write)
    out = {one.name for one in schema.arguments if one.name in written and one.kwarg_only}
    unread = out | (set(written) if name in _OVERWRITES else set()) | (set(_ATTENTION_SCRATCH) if attention else set())
    if "c10d" in space:
        kind = CARRIER
    elif function.is_view or name in ("detach", "alias", "lift_fresh"):
        kind = VIEW
    else:
        kind = UNFILLED if name in _UNFILLED else COMPUTES
    return Operation(
        f"{space}.{name}",
        kind,
        tuple(one.name for one in schema.arguments),
        frozenset(unread),
        written,
        attention and "backward" not in name,
    )


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_in(one)


def named_tensors(how: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Each tensor argument by its name in the schema; those of a list are numbered."""
    for name, value in (*zip(how.arguments, args, strict=False), *kwargs.items()):
        found = list(tensors_in(value))
        for number, tensor in enumerate(found):
            yield (name if isinstance(value, Tensor) else f"{name}.{number}"), tensor


def constant_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Is it told to put a NaN or an Inf in, as masked_fill(scores, mask, -inf) is?"""
    return any(isinstance(value, float) and not math.isfinite(value) for value in (*args, *kwargs.values()))


def storage(tensor: Tensor) -> int:
    """Views share it, and what is written in place stays in it."""
    found: int = tensor.untyped_storage()._cdata
    return found


def whole(tensor: Tensor) -> bool:
    """Does it fill its storage?"""
    return tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes()


def inside(tensor: Tensor, others: list[Tensor]) -> bool:
    """Does it begin in the memory of one of these? FSDP keeps a block's gradients in one storage."""
    return any(
        one.data_ptr() <= tensor.data_ptr() < one.data_ptr() + one.numel() * one.element_size() for one in others
    )


def parameter_of(node: torch.autograd.graph.Node | None) -> Tensor | None:
    """The leaf whose gradient this node sums up."""
    found: Tensor | None = getattr(node, "variable", None)
    return found
