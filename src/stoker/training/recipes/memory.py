"""A run's GPU memory: what was planned beside what was measured (memory.json), and which term was short when it ran out."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from stoker.contract import layout
from stoker.contract.frozen import frozen
from stoker.contract.safe_io import write_atomic
from stoker.contract.units import format_bytes
from stoker.training.config.keys import values_of
from stoker.training.config.schema import Config
from stoker.training.fit.accumulation import Accumulation, choose
from stoker.training.fit.footprint import Footprint
from stoker.training.fit.launch_plan import LaunchPlan, launch_plan
from stoker.training.fit.memory import ADAPTERS, GRADIENTS, OPTIMIZER, REFERENCE, TERMS, WEIGHTS
from stoker.training.fit.plan import DOCUMENT, FULL, SHARDS_ABOUT
from stoker.training.fit.terms import GRPO, Job, Planned, StageNeeds
from stoker.training.loop.say import Voice
from stoker.training.loop.step import Parts
from stoker.training.model.adapters import Beside
from stoker.training.model.config import OFF, AdapterConfig
from stoker.training.model.decoder import Decoder
from stoker.training.optim.muon import local
from stoker.training.optim.optimizer import Optimizer
from stoker.training.parallel.config import recomputed_blocks
from stoker.training.parallel.group import Group

SCHEMA = 1
SPARE = 0.92  # of what is free: fragments, NCCL's buffers, an evaluation
SHORT = "ran out of GPU memory"  # `stoker why` looks for the line that begins so
_LEAST = 32 << 20  # bytes a term has to be over its plan to be named


@frozen
class Holding:
    """What a rank holds from step to step."""

    group: Group
    model: Decoder
    optimizer: Optimizer
    micro: int
    more: Mapping[str, Callable[[], int]] = {}  # other terms of the plan: bytes as they are
    whole: bool = False  # in shards, gradients of all weights wait for the last micro-batch


def planned(
    c: Config, adapter: AdapterConfig, held: Holding, job: Job, graph: bool = False
) -> tuple[Planned | None, str]:
    """(the plan, why it is only about that); no plan of what it does not know: CPUs, fp32, blocks that are not fused."""
    if not _is_known(c, held.group, held.model):
        return None, ""
    footprint = Footprint(held.model.config, adapter, job.needs.stage)
    why = "a CUDA graph has memory of its own: an estimate" if graph else ""
    if job.shards > 1:
        why = SHARDS_ABOUT
    return footprint.planned(job), footprint.why_about or why


def _is_known(c: Config, group: Group, model: Decoder) -> bool:
    """Whether the plan goes through what this run computes."""
    known = group.device.type == "cuda" and isinstance(model, Decoder) and model.dtype != torch.float32
    return known and c.compute.recompute != "selective" and model.fused


def exchanges_each(c: Config, held: Holding, stage: str, share: int, voice: Voice, *, packed: bool) -> bool:
    """parallel.accumulate. `share`: samples of a rank between two updates; `held.micro`: 0 where it is still to be found.
    Without a plan sharded: what takes the least memory."""
    group, asked = held.group, c.parallel.accumulate
    if group.strategy != "fsdp" or group.world == 1:
        return False
    if asked != "auto":
        return asked == "sharded"
    found = Accumulation(False, "the memory plan does not know this run")
    if _is_known(c, group, held.model):
        job = job_of(c, held, StageNeeds(stage, likelihood=c.reward.likelihood), packed=packed, adds=True)
        footprint = Footprint(held.model.config, c.adapter, stage)
        found = choose(footprint, job, room_on(group.device), share, held.micro)
    whole = all(group.all(found.whole))
    if held.micro == 0 or held.micro < share:
        why = found.why if whole == found.whole else "whole ones don't fit on another rank"
        voice.say_once(f"gradients between micro-batches: {'whole' if whole else 'sharded'}; {why}")
    return not whole


def room_on(device: torch.device) -> int:
    """Bytes of a GPU that this process may fill."""
    free, _ = torch.cuda.mem_get_info(device)
    return int((free + torch.cuda.memory_reserved(device)) * SPARE)


def job_of(c: Config, held: Holding, needs: StageNeeds, *, packed: bool, adds: bool) -> Job:
    values, layers, device = values_of(c), held.model.config.layers, held.group.device
    again, mlp = recomputed_blocks(str(values["compute.recompute"]), layers)
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
    return Job(
        held.micro, c.data.context_length, c.optim.kind, packed, max(c.data.context_length // DOCUMENT, 1), again,
        held.group.world, adds, major, values.get("compute.embedding") == "host", c.compute.activations == "host", needs,
        held.group.shards, held.whole, held.group.offload, mlp,
    )  # fmt: skip


def whole_gradients(parts: Parts) -> bool:
    return parts.group.strategy == "fsdp" and not parts.exchange_each


def of_rows(c: Config, stage: str, parts: Parts, folder: str, voice: Voice) -> MemoryRecord:
    """Of a stage that learns from rows that are there before the run."""
    adapters, reference = parts.adapters, getattr(parts.model, "reference", None)
    more = {REFERENCE: lambda: bytes_of(reference)} if isinstance(reference, Decoder) else {}
    held = Holding(parts.group, parts.model, parts.optimizer, parts.own_micro, more, whole_gradients(parts))
    loaded = adapters is not None and adapters.loaded
    needs = StageNeeds(stage, likelihood=c.reward.likelihood, loaded=loaded)
    # Fitting a micro-batch adds gradients to gradients; and so does every step of several micro-batches.
    adds = not c.batch.micro or parts.batch > parts.micro * parts.group.world
    job = job_of(c, held, needs, packed=parts.material.train.packed, adds=adds)
    adapter = c.adapter if adapters is None else adapters.settings
    return MemoryRecord(c, stage, held, planned(c, adapter, held, job, parts.graph == "on"), folder, voice)


def of_grpo(
    c: Config, adapters: Beside | None, held: Holding, needs: StageNeeds, folder: str, voice: Voice
) -> MemoryRecord:
    share = needs.answers // held.group.world
    job = job_of(c, held, needs, packed=False, adds=share > held.micro * needs.updates)
    adapter = c.adapter if adapters is None else adapters.settings
    return MemoryRecord(c, GRPO, held, planned(c, adapter, held, job), folder, voice)


@frozen
class MemoryUse:
    """What a rank's process took of its GPU, in bytes."""

    allocated: int  # in tensors, at the peak
    graphs: int  # of these, what CUDA graphs added to the peak of the steps before them
    reserved: int  # by torch's allocator, at the peak: tensors, and what it keeps for the next ones
    device: int | None  # the process as NVML shows it now, with its CUDA context; None: NVML does not show it


def usage_line(plan: LaunchPlan | None, micro: int, use: MemoryUse) -> str:
    """Compare what a run used with the plan made before it started, and name each number."""
    graphs = f"{format_bytes(use.graphs)} of it by CUDA graphs" if use.graphs else ""
    if plan is None:
        planned, notes = "no plan", [graphs]
    else:
        at = "" if plan.micro == micro else f" for micro-batch {plan.micro}, and it was {micro}"
        planned = f"{format_bytes(plan.planned.total)} planned before the start{at}"
        share = use.allocated / max(plan.planned.total, 1) - 1
        notes = [f"{abs(share):.1%} {'above' if share > 0 else 'below'} the plan", graphs]
    note = ", ".join(filter(None, notes))
    device = "unknown, NVML does not show this process"
    if use.device is not None:
        device = f"{format_bytes(use.device)} now, with the CUDA context (NVML)"
    return (
        f"memory: {planned}; allocated {format_bytes(use.allocated)} at the peak{f' ({note})' if note else ''};"
        f" reserved {format_bytes(use.reserved)} at the peak; on the device {device}"
    )


class MemoryRecord:
    """Compares the memory that a run uses with the launcher's plan, on the console and in memory.json."""

    def __init__(
        self, c: Config, stage: str, held: Holding, own: tuple[Planned | None, str], folder: str, voice: Voice
    ) -> None:
        """`own`: this rank's plan, for runs that `stoker train` has not planned, such as those of torchrun."""
        self._c, self._stage, self._held, self._voice = c, stage, held, voice
        self._path = os.path.join(folder, layout.MEMORY)
        device = held.group.device
        self._cards = held.group.all(torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu")
        self._plan = launch_plan(os.environ)
        if self._plan is None and own[0] is not None:
            self._plan = LaunchPlan(own[0], held.micro, own[1])

    @property
    def planned(self) -> Planned | None:
        return self._plan.planned if self._plan is not None else None

    @property
    def planned_bytes(self) -> int | None:
        return self.planned.total if self.planned is not None else None

    def begin(self) -> None:
        plan = self._plan
        if plan is None:
            return
        about = f" ({plan.about})" if plan.about else ""
        self._voice.say_once(
            f"memory plan: {format_bytes(plan.planned.total)} at most with micro-batch {plan.micro}, in {plan.planned.phase}{about}:"
            f" {_words(plan.planned.terms)}"
        )
        self._write({})

    def end(self, tokens_per_s: float | None, before_graphs: int | None = None) -> None:
        """Print and record what was measured. `before_graphs`: the peak until steps became CUDA graphs."""
        device = self._held.group.device
        if device.type != "cuda":
            return
        allocated, total = torch.cuda.max_memory_allocated(device), _device_bytes(device)
        graphs = 0 if before_graphs is None else max(allocated - before_graphs, 0)
        use = MemoryUse(allocated, graphs, torch.cuda.max_memory_reserved(device), total)
        self._voice.say_once(usage_line(self._plan, self._held.micro, use))
        more = {
            "peak_bytes": use.allocated,
            "graph_bytes": use.graphs,
            "reserved_bytes": use.reserved,
            "device_bytes": use.device,
            "context_bytes": None if total is None else total - torch.cuda.memory_reserved(device),
            "tokens_per_s": tokens_per_s,
        }
        self._write(more)

    def _write(self, more: dict[str, Any]) -> None:
        c, held = self._c, self._held
        if not held.group.first:
            return
        told = {
            "schema": SCHEMA, "stage": self._stage, "model": os.path.realpath(c.model.load) if os.path.isdir(c.model.load) else c.model.load,
            "method": FULL if c.adapter.method == OFF else c.adapter.method, "context": c.data.context_length,
            "strategy": held.group.strategy, "micro": held.micro, "recompute": str(c.compute.recompute), "optimizer": c.optim.kind,
            "cards": self._cards, "planned_bytes": self.planned_bytes,
            "planned_terms": self.planned.terms if self.planned is not None else None, **more,
        }  # fmt: skip
        write_atomic(self._path, json.dumps(told, indent=1).encode(), durable=False)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Says, before it goes on as an error, which term was larger than planned."""
        try:
            yield
        except torch.OutOfMemoryError:
            if self.planned is not None:
                self._voice.say(self._short(self.planned))
            elif self._in_shards:
                self._voice.say(f"{self._at()}; there was no memory plan")
            raise

    @property
    def _in_shards(self) -> str:
        group = self._held.group
        return f" of a model in {group.shards} shards" if group.shards > 1 else ""

    def _at(self) -> str:
        now = torch.cuda.memory_allocated(self._held.group.device) if torch.cuda.is_available() else 0
        return f"{SHORT} at {format_bytes(now)} in tensors{self._in_shards}"

    def _short(self, planned: Planned) -> str:
        held = self._held
        now = torch.cuda.memory_allocated(held.group.device)
        seen = measured(held)
        rest = max(now - sum(seen.values()), 0)
        fixed = {term: planned.terms.get(term, 0) for term in seen}
        fixed[WEIGHTS] += planned.terms.get(ADAPTERS, 0)
        others = planned.total - sum(fixed.values())
        over = {term: seen[term] - size for term, size in fixed.items()} | {
            "activations and working memory": rest - others
        }
        worst = max(over, key=lambda term: over[term])
        line = f"{self._at()}, {format_bytes(planned.total)} were planned"
        if over[worst] < _LEAST:
            return f"{line}; no term is above its plan: the card had less free memory than that, or it was fragmented"
        return f"{line}; underestimated: {worst}, by {format_bytes(over[worst])} so far"


def measured(held: Holding) -> dict[str, int]:
    """Bytes of what stays, by the plan's terms; weights with adapters."""
    grown = (parameter.grad for parameter in held.model.parameters())
    return {
        WEIGHTS: bytes_of(held.model),
        GRADIENTS: sum(local(gradient).nbytes for gradient in grown if gradient is not None),
        OPTIMIZER: sum(one.nbytes for _, one, _ in held.optimizer.state() if one.device == held.model.device),
        **{term: size() for term, size in held.more.items()},
    }


def bytes_of(model: Decoder) -> int:
    """Of its weights where it computes, and of an adapter's copies in 16 bits."""
    found = sum(local(parameter).nbytes for parameter in model.parameters() if parameter.device == model.device)
    for module in model.modules():
        for part in getattr(module, "quantized", ()):
            found += part.codes.nbytes + part.scales.nbytes + 2 * part.second.nbytes
        found += sum(copy.nbytes for copy in getattr(module, "_made", None) or ())
    return found


def _words(terms: dict[str, int]) -> str:
    return ", ".join(f"{term} {format_bytes(terms[term])}" for term in TERMS if terms.get(term, 0) >= 1 << 26)


def _device_bytes(device: torch.device) -> int | None:
    """Return what NVML shows of this process on the GPU: tensors, the allocator's cache, and the CUDA context. None where
    NVML is missing, or does not show the process (a container, a slice of a GPU)."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        sizes = {process.pid: process.usedGpuMemory for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    except pynvml.NVMLError:
        return None
    if os.getpid() in sizes:
        return sizes[os.getpid()] or None
    # In a container NVML shows the host's pids: the only process on the GPU is this one.
    return (next(iter(sizes.values())) or None) if len(sizes) == 1 else None
