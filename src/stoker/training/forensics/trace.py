"""Watches every operation of a replay and keeps where each bad value came from.

An operation whose inputs are finite and whose output is not is an origin; one with a bad input hands that input's
origin on. What counts is the origin of what comes out bad in the end, a loss or a gradient: an Inf that a `where` or a
softmax takes out again is nobody's fault. Autograd's threads inherit the dispatch mode of the thread that called
backward(), so the backward is seen on the CPU and on a GPU alike.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from stoker.contract.frozen import frozen
from stoker.training.forensics.report import BACKWARD, FORWARD, GRADIENT, REDUCED
from stoker.training.forensics.statistics import Named, Origin, Value, counted, extremes, finite, keep, plain, word

OUTSIDE = "(outside of any module)"
_NOTHING: AbstractContextManager[None] = nullcontext()
Stack = list[tuple[str, bool]]  # modules and scopes that are entered, and whether in a backward
_followed: list[Stack] = []  # of the investigation that is under way


@contextmanager
def _entered(stack: Stack, name: str) -> Iterator[None]:
    stack.append((name, False))
    try:
        yield
    finally:
        stack.pop()


def scope(name: str) -> AbstractContextManager[None]:
    """with scope("loss"): ...   Does nothing unless an investigation is under way."""
    return _entered(_followed[0], name) if _followed else _NOTHING


_SENT = "another rank"
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


# What a dispatched operation reads and writes, from its schema.

VIEW = "view"  # no new values
UNFILLED = "unfilled"  # memory as it was found: a NaN there means nothing
CARRIER = "carrier"  # between ranks, perhaps still under way: what went in is what comes out
COMPUTES = "computes"

_UNFILLED = (
    "empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted", "resize_",
    "_resize_output_", "set_",
)  # fmt: skip
_OVERWRITES = (
    "copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_", "_foreach_copy_",
    "_foreach_zero_",
)  # fmt: skip
# The statistics that attention keeps for its backward are infinite, or never written, where a row is masked or padded.
_ATTENTION_SCRATCH = {
    "logsumexp", "softmax_lse", "max_logits", "attn_bias", "attn_mask", "philox_seed", "philox_offset", "cum_seq_q",
    "cum_seq_k",
}  # fmt: skip


@frozen
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
    unread = out | (set(written) if name in _OVERWRITES else set()) | (_ATTENTION_SCRATCH if attention else set())
    if "c10d" in space:
        kind = CARRIER
    elif function.is_view or name in ("detach", "alias", "lift_fresh"):
        kind = VIEW
    else:
        kind = UNFILLED if name in _UNFILLED else COMPUTES
    arguments = tuple(one.name for one in schema.arguments)
    first_output_only = attention and "backward" not in name
    return Operation(f"{space}.{name}", kind, arguments, frozenset(unread), written, first_output_only)


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


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.origins: list[Origin] = []
        self._model = model
        self._stack: Stack = []
        self._of_storage: dict[int, Origin] = {}
        self._received: set[int] = set()  # storages that hold what other ranks sent
        self._made_in: dict[int, str] = {}  # autograd's sequence number of a forward operation -> the module it ran in
        self._micro_batch: int | None = None
        self._batch: tuple[int, int] = (0, 0)
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Tracer:
        for name, module in self._model.named_modules():
            path = clean(name) or "(model)"
            self._handles.append(module.register_forward_pre_hook(partial(self._entered, path), prepend=True))
            # always_call: activation checkpointing leaves a recomputed forward by an exception once it has what it
            # needs.
            self._handles.append(module.register_forward_hook(self._left, always_call=True))
        _followed.append(self._stack)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *problem: Any) -> None:
        super().__exit__(*problem)  # type: ignore[no-untyped-call]
        _followed.clear()
        for handle in self._handles:
            handle.remove()

    def begin(self, micro_batch: int | None, samples: int = 0, length: int = 0) -> None:
        """None: after the last one, where gradients may still be touched."""
        self._micro_batch, self._batch = micro_batch, (samples, length)
        self._made_in.clear()

    def origin_of(self, tensor: Tensor) -> Origin | None:
        found = [self._of_storage.get(storage(part)) for part in plain(tensor.detach())]
        return next((one for one in found if one is not None), None)

    def _entered(self, path: str, module: nn.Module, inputs: Any) -> None:
        self._stack.append((path, _node() is not None))

    def _left(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._stack.pop()

    def _path(self, in_backward: bool) -> str | None:
        """The innermost; None where nothing was entered since the backward began, which is part of none of them."""
        inside = self._stack and (self._stack[-1][1] or not in_backward)
        return self._stack[-1][0] if inside else None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        how, node = operation(func), _node()
        if node is None:  # the operation's own autograd node was made just before it was dispatched
            self._made_in.setdefault(torch._C._autograd._get_sequence_nr() - 1, self._path(False) or OUTSIDE)
        if how.kind == VIEW:
            return func(*args, **given)
        with torch.no_grad():
            inputs = [
                (name, part)
                for name, tensor in named_tensors(how, args, given)
                for part in plain(tensor)
                if counted(part)
            ]
            before = _looked_at([one for one in inputs if one[0] in how.written and one[0] not in how.unread])
        made = func(*args, **given)
        with torch.no_grad():
            outputs = self._outputs(how, made, inputs)
            if how.kind == UNFILLED:
                for _, tensor in outputs:
                    self._forget(tensor)
            elif how.kind == CARRIER:
                self._carry([tensor for _, tensor in inputs], [tensor for _, tensor in outputs])
            elif outputs:
                self._look(how, constant_in(args, given), inputs, before, _looked_at(outputs), node)
        return made

    @staticmethod
    def _outputs(how: Operation, made: Any, inputs: list[Named]) -> list[Named]:
        returned = [part for tensor in tensors_in(made) for part in plain(tensor) if counted(part)]
        if how.first_output_only:
            returned = returned[:1]
        named = [("output" if number == 0 else f"output.{number}", tensor) for number, tensor in enumerate(returned)]
        have = {storage(tensor) for tensor in returned}
        return named + [
            (name, tensor)
            for name, tensor in inputs
            if name.partition(".")[0] in how.written and storage(tensor) not in have
        ]

    def _carry(self, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        origins = [self._of_storage[storage(tensor)] for tensor in inputs if storage(tensor) in self._of_storage]
        for tensor in outputs:
            self._received.add(storage(tensor))
            if origins:
                self._of_storage[storage(tensor)] = min(origins, key=lambda one: one.number)

    def _forget(self, tensor: Tensor) -> None:
        """New memory, perhaps at the address of what was bad."""
        self._of_storage.pop(storage(tensor), None)
        self._received.discard(storage(tensor))

    def _look(
        self, how: Operation, constant: bool, inputs: list[Named], before: list[Value], outputs: list[Value], node: Any
    ) -> None:
        bad = [one for one in outputs if not finite(one[2])]
        for _, tensor, ends in outputs:
            if finite(ends) and (not how.written or whole(tensor)):
                self._forget(tensor)
        if not bad:
            return
        seen = {name for name, _, _ in before}
        read = before + _looked_at(
            [one for one in inputs if one[0] not in how.written and one[0] not in how.unread and one[0] not in seen]
        )
        has_nan = any(word(ends) == "NaN" for _, _, ends in bad)
        origin = self._inherited(how, read, bad[0], has_nan, node)
        if origin is None:
            alone = constant or any(tensor.dim() == 0 and not finite(ends) for _, tensor, ends in read)
            origin = self._new(how, read, bad[0], node, mask=alone and word(bad[0][2]) == "-Inf")
        for _, tensor, _ in bad:
            self._of_storage[storage(tensor)] = origin

    def _inherited(self, how: Operation, read: list[Value], bad: Value, has_nan: bool, node: Any) -> Origin | None:
        found = []
        for name, tensor, ends in read:
            if finite(ends):
                continue
            origin = self._of_storage.get(storage(tensor))
            if origin is None:
                if tensor.dim() == 0:
                    continue  # a constant: the operation that uses it is where it enters
                sent = storage(bad[1]) in self._received  # gloo copies the result over from a buffer of its own
                origin = self._of_storage.get(storage(bad[1])) if sent else None
            if origin is None:
                source = _SENT if sent else self._name_of(tensor)
                mask = word(ends) == "-Inf"
                origin = self._new(how, read, (name, tensor, ends), node, mask=mask, source=source)
                self._of_storage[storage(tensor)] = origin
            found.append(origin)
        guilty = [one for one in found if not one.mask]
        if guilty:
            return min(guilty, key=lambda one: one.number)
        # -inf of a mask stays one; a NaN out of it is new.
        return min(found, key=lambda one: one.number) if found and not has_nan else None

    def _new(self, how: Operation, read: list[Value], bad: Value, node: Any, mask: bool, source: str = "") -> Origin:
        leaf: Tensor | None = getattr(node, "variable", None)  # whose gradient this node sums up
        path = self._path(node is not None)
        phase, parameter = FORWARD, ""
        if leaf is not None or self._micro_batch is None:
            phase, parameter = GRADIENT, self._parameter(leaf, bad[1])
        elif source == _SENT:
            phase = REDUCED
        elif node is not None and path is None:
            phase, path = BACKWARD, self._module_of(node)
        number, module, what = len(self.origins), path or OUTSIDE, word(bad[2])
        origin = Origin(number, how.name, phase, module, parameter, source, self._micro_batch, what, mask)
        keep(origin, read, bad, self._batch if phase == FORWARD else (0, 0), number)
        self.origins.append(origin)
        return origin

    def _module_of(self, node: Any) -> str:
        number = node._sequence_nr()
        if number in self._made_in:
            return self._made_in[number]
        known = sorted(self._made_in)  # a node without a dispatch of its own: it was made between two that have one
        place = bisect_right(known, number)
        return self._made_in[known[place - 1]] if place else OUTSIDE

    def _parameter(self, leaf: Tensor | None, gradient: Tensor) -> str:
        for name, parameter in self._model.named_parameters():
            if parameter is leaf or (parameter.grad is not None and inside(gradient, plain(parameter.grad.detach()))):
                return clean(name)
        return ""

    def _name_of(self, tensor: Tensor) -> str:
        """Whose memory it is, where nothing in the replay wrote it."""
        if storage(tensor) in self._received:
            return _SENT
        for kind, named in (("parameter", self._model.named_parameters()), ("buffer", self._model.named_buffers())):
            for name, one in named:
                if inside(tensor, plain(one.detach())):
                    return f"{kind} {clean(name)}"
        return (
            "a tensor that no operation seen here made: the batch, or a kernel outside torch's dispatcher (Triton, C++)"
        )


def clean(name: str) -> str:
    """A module's name without the wrappers of compile, checkpointing and FSDP."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _node() -> Any:
    """The autograd node that runs on this thread; None in a forward."""
    return torch._C._current_autograd_node()


def _looked_at(tensors: list[Named]) -> list[Value]:
    ends = extremes([tensor for _, tensor in tensors]) if tensors else []
    return [(name, tensor, both) for (name, tensor), both in zip(tensors, ends, strict=True)]
