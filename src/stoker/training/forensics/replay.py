"""The bad step once more, eager and watched: which operation made the first NaN or Inf, where, from what."""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from stoker.contract.shape import replace, shape
from stoker.training.data.reader import IGNORED
from stoker.training.forensics import report as phases
from stoker.training.forensics.culprit import worded
from stoker.training.forensics.report import Report, TensorStats
from stoker.training.forensics.scopes import OUTSIDE
from stoker.training.forensics.statistics import Origin, describe, is_bad, local
from stoker.training.forensics.trace import Tracer, clean

LOSS = "loss"  # the scope that the decoder's loss is in
_SQUARES_OVERFLOW = math.sqrt(torch.finfo(torch.float32).max)


@shape
class MicroBatch:
    """`run` does forward and backward of it, eagerly, with the RNG of the first time, and gives the loss."""

    run: Callable[[], Tensor | None]
    sample_ids: tuple[int, ...] = ()
    inputs: Tensor | None = None  # [samples, tokens]
    targets: Tensor | None = None


@shape
class Replay:
    micro_batches: Sequence[MicroBatch]
    # What the step does to the gradients before their norm: a drill's injection.
    after: Callable[[], None] | None = None


@shape
class Investigation:
    report: Report
    tensors: dict[str, Tensor]  # the bad operation's output and inputs, in the host's memory
    cuts: dict[str, str]  # which of them are not whole


def investigate(model: nn.Module, replay: Replay, report: Report) -> Investigation:
    """`report`: what is known before; the rest is filled in. The replay's gradients stay, for the dump."""
    model.zero_grad(set_to_none=True)
    weights = tuple(describe(clean(name), one) for name, one in model.named_parameters() if is_bad(one))
    tracer = Tracer(model)
    losses, problem = _run(replay, tracer)
    gradients = [(clean(name), one.grad) for name, one in model.named_parameters() if one.grad is not None]
    bad = [(name, gradient) for name, gradient in gradients if is_bad(gradient)]
    ends = [one for one in losses if is_bad(one)] + [gradient for _, gradient in bad]
    origin = _earliest([tracer.origin_of(one) for one in ends])
    if origin is None and problem:
        origin = _earliest([one for one in tracer.origins if not one.mask])
    stats = tuple(describe(name, gradient) for name, gradient in bad)
    report = replace(report, gradients=stats, parameters=weights, problem=problem)
    report = replace(report, **_facts(report, replay, origin, losses, gradients))
    return Investigation(worded(report), origin.tensors if origin else {}, origin.cuts if origin else {})


def _run(replay: Replay, tracer: Tracer) -> tuple[list[Tensor], str]:
    losses: list[Tensor] = []
    try:
        with _eagerly(), tracer:
            for number, one in enumerate(replay.micro_batches):
                tracer.begin(number, len(one.sample_ids), one.inputs.shape[-1] if one.inputs is not None else 0)
                loss = one.run()
                if loss is not None:
                    losses.append(loss.detach())
            tracer.begin(None)
            if replay.after is not None:
                replay.after()
    except Exception:  # whatever the replay raises: the other ranks wait for this one's report
        return losses, traceback.format_exc()
    return losses, ""


def _eagerly() -> AbstractContextManager[object]:
    """Compiled blocks run their Python. Only where something was compiled: dynamo takes seconds to import."""
    if "torch._dynamo" in sys.modules:
        stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
        return stance
    return nullcontext()


def _earliest(origins: list[Origin | None]) -> Origin | None:
    return min((one for one in origins if one is not None), key=lambda one: one.number, default=None)


def _facts(
    found: Report, replay: Replay, origin: Origin | None, losses: list[Tensor], gradients: list[tuple[str, Tensor]]
) -> dict[str, object]:
    """What the report says besides the numbers it was called with."""
    if found.parameters:
        at = _named(replay, origin) if origin else {}
        return {**at, "phase": phases.PARAMETERS, **_first(found.parameters), "sample_ids": ()}
    if origin is not None:
        facts = _named(replay, origin)
        empty = _untargeted(replay, origin.micro_batch)
        if empty and origin.phase == phases.FORWARD and origin.module in (OUTSIDE, "(model)", LOSS):
            return {**facts, "phase": phases.TARGETS, "sample_ids": empty}
        return facts
    if any(is_bad(one) for one in losses):  # a loss that no operation made: a kernel the dispatcher does not see
        number = next(number for number, one in enumerate(losses) if is_bad(one))
        stats = describe("loss", losses[number])
        empty = _untargeted(replay, number)
        return {
            "micro_batch": number,
            "output": stats,
            "what": "NaN" if stats.nan else "Inf",
            "sample_ids": empty or _ids(replay, number),
            "phase": phases.TARGETS if empty else phases.FORWARD,
            "op": "the loss",
            "module": LOSS,
        }
    if found.gradients:
        # Sharded ones are reduced in the backward itself.
        reduced = found.world > 1 and any(type(gradient) is not Tensor for _, gradient in gradients)
        return {"phase": phases.REDUCED if reduced else phases.GRADIENT, **_first(found.gradients)}
    if found.problem:
        return {"phase": phases.FAILED}
    empty = tuple(one for number in range(len(replay.micro_batches)) for one in _untargeted(replay, number))
    if replay.micro_batches and all(_untargeted(replay, number) for number in range(len(replay.micro_batches))):
        return {"phase": phases.TARGETS, "sample_ids": empty, "what": "NaN"}
    return _overflow(found, gradients)


def _first(bad: Sequence[TensorStats]) -> dict[str, object]:
    return {"parameter": bad[0].name, "what": "NaN" if bad[0].nan else "Inf", "output": bad[0]}


def _named(replay: Replay, origin: Origin) -> dict[str, object]:
    ids = _ids(replay, origin.micro_batch)
    some = tuple(ids[position] for position in origin.samples if position < len(ids))
    same = ("phase", "what", "op", "module", "parameter", "source", "micro_batch", "output", "inputs")
    return {**{name: getattr(origin, name) for name in same}, "sample_ids": some or ids}


def _ids(replay: Replay, number: int | None) -> tuple[int, ...]:
    return tuple(replay.micro_batches[number].sample_ids) if number is not None else ()


def _untargeted(replay: Replay, number: int | None) -> tuple[int, ...]:
    """The samples of a micro-batch in which nothing at all is to be learned; empty where something is, or nobody knows."""
    one = replay.micro_batches[number] if number is not None else None
    if one is None or one.targets is None or bool((one.targets != IGNORED).any()):
        return ()
    return tuple(one.sample_ids)


def _overflow(found: Report, gradients: list[tuple[str, Tensor]]) -> dict[str, object]:
    if math.isfinite(found.grad_norm) or not gradients:
        return {}
    norms = [float(torch.linalg.vector_norm(local(gradient), dtype=torch.float64)) for _, gradient in gradients]
    if math.sqrt(sum(norm * norm for norm in norms)) < _SQUARES_OVERFLOW:
        return {}
    name, gradient = gradients[norms.index(max(norms))]
    largest = describe(name, gradient)
    return {"phase": phases.NORM, "what": "Inf", "parameter": name, "output": largest, "gradients": (largest,)}
