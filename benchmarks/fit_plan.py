"""Planned against measured memory of a training step, for models of random weights on one GPU.

    PYTHONPATH=src python benchmarks/fit_plan.py [--json cells.jsonl] [--only TEXT] [--largest]

One line per configuration: what `stoker fit` plans, `max_memory_allocated`, the error, and the terms; beside it accelerate's
rule (four times the weights in their dtype) and LLaMA-Factory's table (18, 2 and 0.5 GB per billion parameters for full,
LoRA and 4-bit QLoRA). `--largest`: is the planned largest micro-batch, under a hard cap of memory, the true one? It and its
neighbours are tried. Every configuration is a process of its own. Shapes with fewer layers than their model have are marked
(L 4 of 48).
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # as training sets it

import torch
from shapes import SHAPES, built

from stoker.contract.shape import replace, shape
from stoker.training.fit.cards import CONTEXT
from stoker.training.fit.described import Described, describe
from stoker.training.fit.terms import BACKWARD, FORWARD, STEP, Job, Planned, predict, reserved
from stoker.training.model import maps
from stoker.training.model.attention import documents, kernels
from stoker.training.model.config import AdapterConfig, ModelConfig, parameters
from stoker.training.optim.config import OptimConfig
from stoker.training.optim.optimizer import Optimizer, gradient_norm

GIB = 1 << 30
CUDA = torch.device("cuda", 0)
CELL, ATTENTION = "CELL ", "attention"  # how a child's result begins; the child that looks at attention kernels
EXACT, ONE_BELOW, BELOW, ABOVE = "exact", "one below", "below", "above"
FAR = 3  # samples above the planned micro-batch that are tried


@shape
class Case:
    model: str
    method: str  # off (full), lora, qlora
    micro: int
    context: int
    recompute: str = "none"  # none, some, all
    packed: bool = False
    optimizer: str = "adamw"
    layers: int = 0  # fewer than the model has

    @property
    def config(self) -> ModelConfig:
        c = SHAPES[self.model]
        return replace(c, layers=self.layers, windows=c.windows[: self.layers]) if self.layers else c

    @property
    def recomputed(self) -> int:
        return {"none": 0, "some": self.config.layers // 2, "all": self.config.layers}[self.recompute]

    @property
    def words(self) -> str:
        short = f" (L {self.layers} of {SHAPES[self.model].layers})" if self.layers else ""
        method = {"off": "full"}.get(self.method, self.method)
        packed = " packed" if self.packed else ""
        kind = "" if self.optimizer == "adamw" else f" {self.optimizer}"
        return f"{self.model}{short} {method} {self.micro}x{self.context} recompute {self.recompute}{packed}{kind}"


CASES = (
    Case("smollm2-135m", "off", 8, 1024), Case("smollm2-135m", "off", 4, 2048, "all", True), Case("smollm2-135m", "lora", 8, 512),
    Case("tinyllama-1.1b", "off", 2, 2048, "some"), Case("tinyllama-1.1b", "lora", 4, 2048), Case("tinyllama-1.1b", "qlora", 4, 2048),
    Case("tinyllama-1.1b", "qlora", 1, 1024, "all"), Case("tinyllama-1.1b", "off", 1, 1024, "all", False, "adamw8bit"),
    Case("llama-3.2-3b", "off", 1, 2048), Case("llama-3.2-3b", "lora", 2, 4096, "some", True),
    Case("llama-3.1-8b", "qlora", 1, 2048, "all"), Case("llama-3.1-8b", "qlora", 4, 2048), Case("llama-3.1-8b", "lora", 4, 2048),
    Case("llama-3.1-8b", "qlora", 1, 8192, "some", True),
    Case("qwen2.5-0.5b", "off", 4, 1024), Case("qwen2.5-0.5b", "qlora", 8, 512, "all"), Case("qwen2.5-1.5b", "lora", 4, 2048, "none", True),
    Case("qwen2.5-1.5b", "off", 2, 1024, "all"), Case("qwen2.5-14b", "qlora", 1, 1024, "all"), Case("qwen2.5-14b", "lora", 1, 2048, "some"),
    Case("qwen3-0.6b", "off", 4, 2048, "some", True), Case("qwen3-0.6b", "lora", 2, 4096), Case("qwen3-4b", "qlora", 2, 2048, "some"),
    Case("qwen3-4b", "lora", 1, 4096, "all", True), Case("gemma3-1b", "off", 2, 1024), Case("gemma3-1b", "lora", 4, 2048, "all"),
    Case("gemma3-1b", "qlora", 2, 4096, "none", True), Case("gemma3-4b", "qlora", 1, 2048, "some"), Case("mistral-7b", "qlora", 2, 4096, "all"),
    Case("mistral-7b", "lora", 1, 8192, "some"), Case("mistral-7b", "off", 1, 512, "none", False, "adamw", 12),
    Case("tinyllama-1.1b", "off", 2, 1024, "none", False, "muon"),
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="a line per configuration is added to this file")
    parser.add_argument("--only", default="", help="configurations whose name holds this")
    parser.add_argument("--largest", action="store_true", help="largest micro-batches under a cap of memory, too")
    parser.add_argument("--attention", action="store_true", help="what attention kernels allocate, too")
    parser.add_argument("--seconds", type=float, default=540.0, help="no configuration begins later than this")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    told = parser.parse_args()
    if not torch.cuda.is_available():
        print("fit_plan.py: no GPU here", file=sys.stderr)
        return 69
    if told.one == ATTENTION:
        return _attention_lines()
    if told.one:
        return _one(CASES[int(told.one)], told.largest)
    cells, began = [], time.monotonic()
    if told.attention:
        subprocess.run([sys.executable, __file__, "--one", ATTENTION], check=False)
    for at, case in enumerate(CASES):
        if told.only not in case.words or time.monotonic() - began > told.seconds:
            continue
        cell = _apart(at, told.largest)
        cells.append(cell)
        if told.json:
            with open(told.json, "a") as file:
                file.write(json.dumps(cell) + "\n")
    _summary([cell for cell in cells if "error" in cell])
    print(
        f"{len(cells)} configurations in {time.monotonic() - began:.0f} s; without a result: {sum('error' not in c for c in cells)}"
    )
    return 0


def _apart(at: int, largest: bool) -> dict[str, Any]:
    """In a process of its own: no fragments, buffers or kernels of the configuration before."""
    argv = [sys.executable, __file__, "--one", str(at), *(["--largest"] if largest else [])]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=False)
    cell: dict[str, Any] = {"case": CASES[at].words, "failed": done.returncode}
    for line in done.stdout.splitlines():
        if line.startswith(CELL):
            cell = json.loads(line.removeprefix(CELL))
        else:
            print(line, flush=True)
    return cell


def _one(case: Case, largest: bool) -> int:
    idle = _used()  # before there is a context of ours
    capability = torch.cuda.get_device_capability(CUDA)[0]
    print(CELL + json.dumps(_cell(case, capability, largest, idle)), flush=True)
    return 0


def _cell(case: Case, capability: int, largest: bool, idle: int) -> dict[str, Any]:
    described = describe(case.config, AdapterConfig(method=case.method))
    job = Job(case.micro, case.context, case.optimizer, case.packed, 1, case.recomputed, 1, True, capability)
    planned = predict(described, job)
    began = time.perf_counter()
    try:
        with kernels("auto"):
            seen = _measure(case, case.micro)
    except torch.OutOfMemoryError as problem:
        _clear()
        print(f"{case.words}: out of memory ({str(problem)[:80]})", flush=True)
        return {"case": case.words, "planned": planned.total, "out_of_memory": True}
    error = planned.total / seen["peak"] - 1
    seen["device"] = _used() - idle
    billions = parameters(case.config) / 1e9
    rules = {"accelerate": 4e9 * billions * {"off": 4, "lora": 2, "qlora": 0.5}[case.method]}
    rules["llama_factory"] = 1e9 * billions * {"off": 18, "lora": 2, "qlora": 0.5}[case.method]
    cell: dict[str, Any] = {
        "case": case.words, "planned": planned.total, "peak": seen["peak"], "error": error, "terms": planned.terms,
        "phases": planned.phases, "measured": seen,
        "planned_device": reserved(planned.total) + CONTEXT, **{name: int(value) for name, value in rules.items()},
    }  # fmt: skip
    more = _largest(case, described, job, planned) if largest else {}
    cell.update(more)
    _clear()
    print(_line(case, planned, cell, time.perf_counter() - began), flush=True)
    return cell


def gib(size: float) -> str:
    return f"{size / GIB:.2f}"


def _line(case: Case, planned: Planned, cell: dict[str, Any], seconds: float) -> str:
    seen = cell["measured"]
    phases = ", ".join(
        f"{name} {gib(planned.phases[phase])}/{gib(seen[name])}"
        for name, phase in (("forward", FORWARD), ("backward", BACKWARD), ("step", STEP))
    )
    held = planned.terms
    static = held.get("weights", 0) + held.get("adapters", 0)
    terms = " ".join(f"{name} {gib(size)}" for name, size in held.items() if size > 1 << 20)
    rules = ", ".join(f"{name} {cell[name] / seen['peak'] - 1:+.0%}" for name in ("accelerate", "llama_factory"))
    largest = f" | largest {cell['largest']}" if "largest" in cell else ""
    return (
        f"{case.words}: planned {gib(planned.total)} GiB, measured {gib(seen['peak'])}, {cell['error']:+.2%} | {phases}"
        f" | weights {gib(static)}/{gib(seen['weights'])} optimizer {gib(held.get('optimizer', 0))}/{gib(seen['optimizer'])}"
        f" reserved {gib(seen['reserved'])} device {gib(cell['planned_device'])}/{gib(seen['device'])} | {terms} | {rules}{largest} ({seconds:.1f} s)"
    )


def _measure(case: Case, micro: int) -> dict[str, int]:
    """Two micro-batches, the second with the gradients of the first, and an optimizer step: as recipes/build.py tries."""
    before = torch.cuda.memory_allocated(CUDA)
    again = str(case.recomputed) if case.recomputed else "off"
    model = built(case.config, AdapterConfig(method=case.method), case.context, again, quick=True)
    weights = torch.cuda.memory_allocated(CUDA)
    optimizer = Optimizer(model, OptimConfig(kind=case.optimizer))
    states = torch.cuda.memory_allocated(CUDA)
    seen = {"before": before, "weights": weights - before, "optimizer": states - weights, "forward": 0, "backward": 0}
    inputs = torch.randint(0, case.config.vocab_size, (micro, case.context), device=CUDA)
    targets = inputs % inputs.shape[1]
    for _ in range(2):
        packed = documents(torch.zeros(inputs.shape, dtype=torch.int32) if case.packed else None, CUDA)
        torch.cuda.reset_peak_memory_stats(CUDA)
        loss = model(inputs, targets, torch.zeros((), device=CUDA), packed)
        torch.cuda.synchronize(CUDA)
        seen["forward"] = max(seen["forward"], torch.cuda.max_memory_allocated(CUDA))
        torch.cuda.reset_peak_memory_stats(CUDA)
        loss.backward()
        del loss
        torch.cuda.synchronize(CUDA)
        seen["backward"] = max(seen["backward"], torch.cuda.max_memory_allocated(CUDA))
    torch.cuda.reset_peak_memory_stats(CUDA)
    optimizer.step(0.0, gradient_norm(optimizer.parameters), torch.ones((), device=CUDA))
    torch.cuda.synchronize(CUDA)
    seen["step"] = torch.cuda.max_memory_allocated(CUDA)
    seen["peak"] = max(seen[name] for name in ("forward", "backward", "step"))
    seen["reserved"] = torch.cuda.memory_reserved(CUDA)
    return seen


def _largest(case: Case, described: Described, job: Job, planned: Planned) -> dict[str, Any]:
    """Under a cap with place for a sample and a half more than the case has: is the planned largest micro-batch the true one?"""
    more = predict(described, replace(job, micro=job.micro + 2)).total - planned.total
    cap = int(planned.total + 0.75 * more) + (256 << 20)
    fits = max(m for m in range(1, 4 * job.micro + 4) if _needs(described, job, m) <= cap)
    runs = functools.partial(_runs, case, cap)
    true = true_largest(fits, runs)
    return {"largest": verdict(fits, true), "cap": cap, "planned_largest": fits, "true_largest": true}


def _runs(case: Case, cap: int, micro: int) -> bool:
    _clear()
    torch.cuda.set_per_process_memory_fraction(
        min(cap / torch.cuda.get_device_properties(CUDA).total_memory, 1.0), CUDA
    )
    try:
        with kernels("auto"):
            _measure(case, micro)
    except torch.OutOfMemoryError:
        return False
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, CUDA)
    return True


def true_largest(planned: int, runs: Callable[[int], bool]) -> int:
    """Tried upwards from the planned one, or downwards where that does not run; FAR further at most."""
    if runs(planned):
        return next((m - 1 for m in range(planned + 1, planned + FAR + 1) if not runs(m)), planned + FAR)
    return next((m for m in range(planned - 1, 0, -1) if runs(m)), 0)


def verdict(planned: int, true: int) -> str:
    if planned > true:
        return ABOVE
    return {0: EXACT, 1: ONE_BELOW}.get(true - planned, BELOW)


def _needs(described: Described, job: Job, micro: int) -> int:
    return reserved(predict(described, replace(job, micro=micro)).total)


def _used() -> int:
    """Bytes in use on the card, by whoever."""
    import pynvml

    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)


def _clear() -> None:
    maps.BUFFERS._held.clear()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(CUDA)


def _attention_lines() -> int:
    """What attention kernels allocate besides their results."""
    for B, T, H, K, D in (
        (1, 2048, 32, 8, 128),
        (4, 2048, 32, 8, 128),
        (1, 8192, 32, 8, 128),
        (2, 1024, 14, 2, 64),
        (1, 4096, 4, 1, 256),
        (2, 2048, 16, 16, 128),
    ):
        for packed in (False, True):
            print("  attention " + " ".join(_attention_line(B, T, H, K, D, packed=packed)), flush=True)
    return 0


def _attention_line(B: int, T: int, H: int, K: int, D: int, *, packed: bool) -> Iterator[str]:
    from stoker.training.model.attention import attend, seen_by

    buffer = torch.randn(B * T, (H + 2 * K) * D, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    q, k, v = (part.view(B, T, -1, D) for part in torch.split(buffer, [H * D, K * D, K * D], dim=1))
    whole = documents(torch.zeros(B, T, dtype=torch.int32) if packed else None, CUDA)
    x = torch.empty(B, T, 1, device=CUDA, dtype=torch.bfloat16)
    with kernels("auto"):
        seen = seen_by(whole, 0, x, head_dim=D)
        for _ in range(2):  # the first call makes plans
            torch.cuda.reset_peak_memory_stats(CUDA)
            before = torch.cuda.memory_allocated(CUDA)
            y = attend(q, k, v, seen)
            torch.cuda.synchronize(CUDA)
            forward, kept = torch.cuda.max_memory_allocated(CUDA) - before, torch.cuda.memory_allocated(CUDA) - before
            g = torch.randn_like(y)
            torch.cuda.reset_peak_memory_stats(CUDA)
            between = torch.cuda.memory_allocated(CUDA)
            found = torch.autograd.grad(y, (q, k, v), g, retain_graph=False)
            torch.cuda.synchronize(CUDA)
            backward = torch.cuda.max_memory_allocated(CUDA) - between
            del y, g, found
            q, k, v = (part.view(B, T, -1, D) for part in torch.split(buffer, [H * D, K * D, K * D], dim=1))
    unit = B * T * H * D * 2
    results = B * T * (H + 2 * K) * D * 2
    yield f"B {B} T {T} H {H} K {K} D {D} {'flash' if packed else 'cudnn'}:"
    yield f"forward {forward} kept {kept} (out {unit}, sums {B * T * H * 4}), backward {backward} (results {results},"
    yield f"over them {(backward - results) / unit:.3f} outs)"


def _summary(cells: list[dict[str, Any]]) -> None:
    if not cells:
        return
    errors = sorted(abs(cell["error"]) for cell in cells)
    under = [(cell["error"], cell["peak"] - cell["planned"], cell["case"]) for cell in cells if cell["error"] < 0]
    worst = min(under, default=(0.0, 0, "none"))
    p95 = errors[min(int(0.95 * len(errors)), len(errors) - 1)]
    print(
        f"{len(cells)} configurations: median {statistics.median(errors):.2%}, 95th percentile {p95:.2%}, worst under"
        f" {worst[0]:.2%} ({worst[1] / (1 << 20):.0f} MiB: {worst[2]})"
    )
    devices = sorted(abs(cell["planned_device"] / max(cell["measured"]["device"], 1) - 1) for cell in cells)
    contexts = [cell["measured"]["device"] - cell["measured"]["reserved"] for cell in cells]
    print(
        f"device memory (NVML): median {statistics.median(devices):.2%}, worst {devices[-1]:.2%}; beside the allocator's"
    )
    print(f"  {min(contexts) / GIB:.2f} to {max(contexts) / GIB:.2f} GiB (planned {CONTEXT / GIB:.2f})")
    for name in ("accelerate", "llama_factory"):
        theirs = sorted(abs(cell[name] / cell["peak"] - 1) for cell in cells)
        print(
            f"{name}: median {statistics.median(theirs):.0%}, 95th percentile {theirs[min(int(0.95 * len(theirs)), len(theirs) - 1)]:.0%}"
        )
    verdicts = [cell["largest"] for cell in cells if "largest" in cell]
    if verdicts:
        print(
            "largest micro-batch: "
            + ", ".join(f"{verdicts.count(kind)} {kind}" for kind in (EXACT, ONE_BELOW, BELOW, ABOVE))
        )


if __name__ == "__main__":
    sys.exit(main())
