"""A run's GPU memory: what was planned beside what was measured (memory.json), and which term was short when it ran out."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from stoker.contract import layout
from stoker.contract.wholefile import write_whole
from stoker.training.config.keys import values_of
from stoker.training.config.schema import Config
from stoker.training.fit.footprint import Footprint
from stoker.training.fit.memory import ADAPTERS, GRADIENTS, OPTIMIZER, TERMS, WEIGHTS
from stoker.training.fit.plan import DOCUMENT, FULL, gib
from stoker.training.fit.terms import Job, Planned
from stoker.training.loop.say import Voice
from stoker.training.loop.step import Parts
from stoker.training.model.config import OFF
from stoker.training.model.decoder import Decoder
from stoker.training.parallel.config import recomputed_blocks

SCHEMA = 1
SHORT = "ran out of GPU memory"  # `stoker why` looks for the line that begins so
_LEAST = 32 << 20  # bytes a term has to be over its plan to be named


def job_of(c: Config, parts: Parts) -> Job:
    values, layers = values_of(c), parts.model.config.layers
    again = recomputed_blocks(str(values["compute.recompute"]), layers)
    packed = parts.material.train.packed
    major = torch.cuda.get_device_capability(parts.group.device)[0]
    # Fitting a micro-batch adds gradients to gradients; and so does every step of several micro-batches.
    adds = not c.batch.micro or parts.batch > parts.micro * parts.group.world
    return Job(
        parts.own_micro, c.data.context_length, c.optim.kind, packed, max(c.data.context_length // DOCUMENT, 1), again,
        parts.group.world, adds, major, values.get("compute.embedding") == "host",
        c.compute.activations == "host",
    )  # fmt: skip


def planned_of(c: Config, parts: Parts) -> tuple[Planned | None, str]:
    """(the plan, why it is only about that); no plan of what it does not know: CPUs, shards, reward models, fp32, blocks that
    are not fused."""
    known = parts.group.device.type == "cuda" and parts.group.strategy == "ddp" and type(parts.model) is Decoder
    if not known or parts.model.dtype == torch.float32 or c.compute.recompute == "selective" or not parts.model.fused:
        return None, ""
    adapter = c.adapter if parts.adapters is None else parts.adapters.settings
    footprint = Footprint(parts.model.config, adapter)
    graph = "a CUDA graph has memory of its own: an estimate" if parts.graph else ""
    return footprint.planned(job_of(c, parts)), footprint.why_about or graph


class MemoryRecord:
    def __init__(self, c: Config, parts: Parts, folder: str, voice: Voice) -> None:
        self._c, self._parts, self._voice = c, parts, voice
        self._path = os.path.join(folder, layout.MEMORY)
        gpu = parts.group.device.type == "cuda"
        self._cards = parts.group.all(torch.cuda.get_device_name(parts.group.device) if gpu else "cpu")
        self.planned, self._about = planned_of(c, parts)

    @property
    def planned_bytes(self) -> int | None:
        return self.planned.total if self.planned is not None else None

    def begin(self) -> None:
        if self.planned is None:
            return
        about = f" ({self._about})" if self._about else ""
        self._voice.say_once(
            f"memory plan: {gib(self.planned.total)} at most, in {self.planned.phase}{about}: {_words(self.planned.terms)}"
        )
        self._write({})

    def end(self, tokens_per_s: float | None) -> None:
        """Beside what was measured."""
        if self._parts.group.device.type != "cuda":
            return
        device = self._parts.group.device
        peak, held = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        if self.planned is not None:
            off = self.planned.total / max(peak, 1) - 1
            self._voice.say_once(f"memory: {gib(self.planned.total)} planned, {gib(peak)} measured ({off:+.1%})")
        more = {
            "peak_bytes": peak,
            "reserved_bytes": held,
            "context_bytes": _context(device),
            "tokens_per_s": tokens_per_s,
        }
        self._write(more)

    def _write(self, more: dict[str, Any]) -> None:
        c, parts = self._c, self._parts
        if not parts.group.first:
            return
        told = {
            "schema": SCHEMA, "model": os.path.realpath(c.model.load) if os.path.isdir(c.model.load) else c.model.load,
            "method": FULL if c.adapter.method == OFF else c.adapter.method, "context": c.data.context_length,
            "micro": parts.own_micro, "recompute": str(c.compute.recompute), "optimizer": c.optim.kind,
            "cards": self._cards, "planned_bytes": self.planned_bytes,
            "planned_terms": self.planned.terms if self.planned is not None else None, **more,
        }  # fmt: skip
        write_whole(self._path, json.dumps(told, indent=1).encode(), durable=False)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Says, before it goes on as an error, which term was larger than planned."""
        try:
            yield
        except torch.OutOfMemoryError:
            if self.planned is not None:
                self._voice.say(self._short(self.planned))
            raise

    def _short(self, planned: Planned) -> str:
        parts = self._parts
        seen = _held(parts.model, parts.optimizer)
        rest = max(torch.cuda.memory_allocated(parts.group.device) - sum(seen.values()), 0)
        fixed = {WEIGHTS: planned.terms.get(WEIGHTS, 0) + planned.terms.get(ADAPTERS, 0)}
        fixed |= {term: planned.terms.get(term, 0) for term in (GRADIENTS, OPTIMIZER)}
        others = planned.total - sum(fixed.values())
        over = {term: seen[term] - size for term, size in fixed.items()} | {
            "activations and working memory": rest - others
        }
        worst = max(over, key=lambda term: over[term])
        line = f"{SHORT} at {gib(torch.cuda.memory_allocated(parts.group.device))} in tensors, {gib(planned.total)} were planned"
        if over[worst] < _LEAST:
            return f"{line}; no term is above its plan: the card had less room than that, or it is in pieces"
        return f"{line}; underestimated: {worst}, by {gib(over[worst])} so far"


def _held(model: nn.Module, optimizer: Any) -> dict[str, int]:
    """Measured bytes of what stays."""
    weights = gradients = 0
    for parameter in model.parameters():
        weights += parameter.nbytes
        gradients += parameter.grad.nbytes if parameter.grad is not None else 0
    for module in model.modules():
        for part in getattr(module, "quantized", ()):
            weights += part.codes.nbytes + part.scales.nbytes + 2 * part.second.nbytes
        copies = getattr(module, "_made", None)  # an adapter's, in 16 bits
        weights += sum(copy.nbytes for copy in copies[1]) if copies else 0
    return {WEIGHTS: weights, GRADIENTS: gradients, OPTIMIZER: sum(tensor.nbytes for _, tensor, _ in optimizer.state())}


def _words(terms: dict[str, int]) -> str:
    return ", ".join(f"{term} {gib(terms[term])}" for term in TERMS if terms.get(term, 0) >= 1 << 26)


def _context(device: torch.device) -> int | None:
    """Bytes of this process on the card that are not torch's tensors: driver, kernels, libraries. None: nobody knows."""
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        found = {one.pid: one.usedGpuMemory for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    except Exception:  # no NVML, a slice, a container that hides it: a number less in a record
        return None
    own = found.get(os.getpid()) or (next(iter(found.values())) if len(found) == 1 else None)
    return own - torch.cuda.memory_reserved(device) if own else None
