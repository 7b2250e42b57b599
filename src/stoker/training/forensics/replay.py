"""The bad step once more, eager and watched: which operation made the first NaN or Inf, where, from what."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from stoker.contract.errors import EX_CONFIG, Refusal
from stoker.contract.frozen import frozen, replace
from stoker.contract.masking import mask_json
from stoker.contract.options import suggest
from stoker.contract.safe_io import write_atomic
from stoker.contract.tensor_header import pack_header
from stoker.contract.units import format_bytes
from stoker.training.checkpoint.folders import put_in_place
from stoker.training.data.reader import IGNORED
from stoker.training.forensics import report as phases
from stoker.training.forensics.config import Injection
from stoker.training.forensics.culprit import banner, worded
from stoker.training.forensics.reading import ACTIVATIONS, BATCH, GRADIENTS, PARAMETERS, REPORT, rank_folder
from stoker.training.forensics.report import Report, TensorStats
from stoker.training.forensics.statistics import Origin, describe, is_bad, local
from stoker.training.forensics.trace import OUTSIDE, Tracer, clean


class Drill:
    """Set `step` before each step, and before its replay: what is injected depends on nothing else."""

    def __init__(self, injection: Injection | None, model: nn.Module, rank: int) -> None:
        self.step = -1
        self._injection = injection if injection is not None and injection.rank in (None, rank) else None
        self._parameter: nn.Parameter | None = None
        if self._injection is None:
            return
        if self._injection.gradient:
            self._parameter = _of_name(dict(model.named_parameters()), self._injection.where, "parameter")
            if not self._parameter.requires_grad:
                raise Refusal(f"nan.inject: parameter {self._injection.where} is frozen and has no gradient", EX_CONFIG)
        else:
            modules = {name: module for name, module in model.named_modules() if name}
            _of_name(modules, self._injection.where, "module").register_forward_hook(self._spoil)

    @property
    def injected(self) -> str:
        """The value of nan.inject if this rank injects a fault into this step, else empty."""
        return self._injection.text if self._injection is not None and self._due() else ""

    def _due(self) -> bool:
        return self._injection is not None and self.step == self._injection.step

    def _spoil(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        if not self._due() or self._injection is None:
            return None
        first, *rest = output if isinstance(output, (tuple, list)) else (output,)
        spot = torch.zeros_like(first, dtype=torch.bool)
        spot[(0,) * spot.dim()] = True
        spoiled = first.masked_fill(spot, self._injection.value)
        return type(output)((spoiled, *rest)) if isinstance(output, (tuple, list)) else spoiled

    def spoil_gradients(self) -> None:
        """After the backward, before the norm."""
        if self._parameter is None or not self._due() or self._injection is None or self._parameter.grad is None:
            return
        mine = local(self._parameter.grad)
        if mine.numel():  # an uneven shard may be empty
            mine[(0,) * mine.dim()] += self._injection.value


def _of_name(known: dict[str, Any], name: str, kind: str) -> Any:
    if name not in known:
        raise Refusal(f"nan.inject: the model has no {kind} {name}{suggest(name, known)}", EX_CONFIG)
    return known[name]


LOSS = "loss"  # the scope that the decoder's loss is in
_SQUARES_OVERFLOW = math.sqrt(torch.finfo(torch.float32).max)


@frozen
class MicroBatch:
    """`run` does forward and backward of it, eagerly, with the RNG of the first time, and gives the loss."""

    run: Callable[[], Tensor | None]
    sample_ids: tuple[int, ...] = ()
    inputs: Tensor | None = None  # [samples, tokens]
    targets: Tensor | None = None


@frozen
class Replay:
    micro_batches: Sequence[MicroBatch]
    # What the step does to the gradients before their norm: a drill's injection.
    after: Callable[[], None] | None = None


@frozen
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


_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
SPARE = 1 << 30  # bytes the disk keeps for the checkpoint that may follow

Decode = Callable[[list[int]], str]


def write_dump(
    folder: str,
    found: Investigation,
    model: nn.Module,
    replay: Replay,
    decode: Decode | None = None,
    parameters: bool = True,
) -> str:
    """Gives the rank's folder. `parameters`: False where another rank writes the same ones."""
    report = found.report
    final = rank_folder(folder, report.step, report.rank)
    building = os.path.join(os.path.dirname(final), f".rank-{report.rank}.{os.getpid()}.tmp")
    os.makedirs(building)
    try:
        left_out: dict[str, str] = {} if parameters else {PARAMETERS: "the same on every rank: written by another one"}
        about = {"step": str(report.step), "rank": str(report.rank)}
        weights = {clean(name): one.detach() for name, one in model.named_parameters()} if parameters else {}
        gradients = {clean(name): one.grad for name, one in model.named_parameters() if one.grad is not None}
        write_tensors(
            os.path.join(building, ACTIVATIONS),
            found.tensors,
            {**about, **{f"cut {name}": cut for name, cut in found.cuts.items()}},
        )
        for name, tensors in ((GRADIENTS, gradients), (PARAMETERS, weights)):
            _write_if_room(os.path.join(building, name), tensors, about, left_out)
        write_atomic(os.path.join(building, BATCH), json.dumps(_batch(replay, decode), indent=1))
        about_files = {"cut": dict(found.cuts), "left_out": left_out}
        data = mask_json({"report": report.to_json(), "files": about_files})
        write_atomic(os.path.join(building, REPORT), json.dumps(data, indent=1))
        write_atomic(os.path.join(building, "banner.txt"), banner(report, final) + "\n")
        put_in_place(building, final)  # a restarted attempt that fails at the same step replaces the one before
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    return final


def _write_if_room(path: str, tensors: dict[str, Tensor], about: dict[str, str], left_out: dict[str, str]) -> None:
    name = os.path.basename(path)
    if name in left_out:
        return
    need, have = bytes_of(tensors), shutil.disk_usage(os.path.dirname(path)).free
    if need + SPARE > have and need > SPARE // 16:  # small files are always worth a try
        left_out[name] = f"{format_bytes(need)} needed, {format_bytes(have)} free"
        return
    write_tensors(path, tensors, about)


def _batch(replay: Replay, decode: Decode | None) -> dict[str, Any]:
    samples: list[dict[str, Any]] = []
    for number, one in enumerate(replay.micro_batches):
        for position, sample in enumerate(one.sample_ids):
            tokens = _row(one.inputs, position, len(one.sample_ids)) or []
            wanted = _row(one.targets, position, len(one.sample_ids))
            samples.append(
                {
                    "micro_batch": number,
                    "id": int(sample),
                    "tokens": tokens,
                    "text": decode(tokens) if decode is not None and tokens else None,
                    "targets": None if wanted is None else sum(target != IGNORED for target in wanted),
                }
            )
    return {"schema": 1, "samples": samples}


def _row(table: Tensor | None, position: int, count: int) -> list[int] | None:
    return None if table is None else [int(token) for token in table.reshape(count, -1)[position].tolist()]


def bytes_of(tensors: Mapping[str, Tensor]) -> int:
    return sum(local(one).numel() * one.element_size() for one in tensors.values())


def write_tensors(path: str, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    """A safetensors file, one tensor after the other: the host needs room for the largest, not for all of them. Of a
    sharded tensor this rank's part; complex ones and other dtypes the format has no name for as fp32.
    """
    parts = {name: local(tensor) for name, tensor in tensors.items()}
    sizes = {name: (_NAMES.get(mine.dtype, "F32"), tuple(mine.shape)) for name, mine in parts.items()}
    with open(path, "wb") as file:
        file.write(pack_header(sizes, about))
        for mine in parts.values():
            flat = (mine if mine.dtype in _NAMES else mine.to(torch.float32)).to("cpu").contiguous().reshape(-1)
            if flat.numel():
                file.write(flat.view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
