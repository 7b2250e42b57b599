"""Planned against measured memory of a training step, for models of random weights on one GPU.

    PYTHONPATH=src python benchmarks/fit_plan.py [--json cells.jsonl] [--only TEXT] [--largest]

One line per configuration: what `stoker fit` plans, `max_memory_allocated`, the error, and the terms; beside it accelerate's
rule (four times the weights in their dtype) and LLaMA-Factory's table (18, 2 and 0.5 GB per billion parameters for full,
LoRA and 4-bit QLoRA). `--largest`: is the planned largest micro-batch, under a hard cap of memory, the true one? Shapes with
fewer layers than their model have are marked (L 4 of 48).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # as training sets it

import torch

from stoker.contract.shape import replace, shape
from stoker.training.fit.cards import CONTEXT
from stoker.training.fit.described import Described, describe
from stoker.training.fit.terms import BACKWARD, FORWARD, STEP, Job, Planned, predict, reserved
from stoker.training.model import adapters, maps, nf4, ready
from stoker.training.model.attention import documents, kernels
from stoker.training.model.config import AdapterConfig, ModelConfig, parameters
from stoker.training.model.decoder import Decoder
from stoker.training.model.nf4_size import BLOCK, SECOND_BLOCK
from stoker.training.optim.config import OptimConfig
from stoker.training.optim.optimizer import Optimizer, gradient_norm
from stoker.training.parallel.config import ComputeConfig

GIB = 1 << 30
CUDA = torch.device("cuda", 0)


def _model(
    family: str, layers: int, dim: int, heads: int, kv_heads: int, ff: int, vocab: int, **more: Any
) -> ModelConfig:
    more = {"head_dim": dim // heads, "tied": False, **more}
    return ModelConfig(
        family=family, layers=layers, dim=dim, heads=heads, kv_heads=kv_heads, ff=ff, vocab_size=vocab, **more
    )


def _gemma3(layers: int, dim: int, heads: int, kv_heads: int, ff: int) -> ModelConfig:
    return _model(
        "gemma3_text", layers, dim, heads, kv_heads, ff, 262144, head_dim=256, tied=True, qk_norm=True, norms="both",
        norm_offset=1.0, activation="gelu_tanh", attention_scale=256**-0.5, embedding_scale=dim**0.5, window_theta=10000.0,
        windows=tuple(0 if at % 6 == 5 else 512 for at in range(layers)),
    )  # fmt: skip


SHAPES = {
    "smollm2-135m": _model("llama", 30, 576, 9, 3, 1536, 49152, tied=True),
    "tinyllama-1.1b": _model("llama", 22, 2048, 32, 4, 5632, 32000),
    "llama-3.2-3b": _model("llama", 28, 3072, 24, 8, 8192, 128256, tied=True),
    "llama-3.1-8b": _model("llama", 32, 4096, 32, 8, 14336, 128256),
    "qwen2.5-0.5b": _model("qwen2", 24, 896, 14, 2, 4864, 151936, tied=True, qkv_bias=True),
    "qwen2.5-1.5b": _model("qwen2", 28, 1536, 12, 2, 8960, 151936, tied=True, qkv_bias=True),
    "qwen2.5-14b": _model("qwen2", 48, 5120, 40, 8, 13824, 152064, qkv_bias=True),
    "qwen3-0.6b": _model("qwen3", 28, 1024, 16, 8, 3072, 151936, head_dim=128, tied=True, qk_norm=True),
    "qwen3-4b": _model("qwen3", 36, 2560, 32, 8, 9728, 151936, head_dim=128, tied=True, qk_norm=True),
    "gemma3-1b": _gemma3(26, 1152, 4, 1, 6912),
    "gemma3-4b": _gemma3(34, 2560, 8, 4, 10240),
    "mistral-7b": _model("mistral", 32, 4096, 32, 8, 14336, 32768, windows=(4096,) * 32),
}


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
    told = parser.parse_args()
    if not torch.cuda.is_available():
        print("fit_plan.py: no GPU here", file=sys.stderr)
        return 69
    idle = _used()  # before there is a context of ours
    capability = torch.cuda.get_device_capability(CUDA)[0]
    print(f"{torch.cuda.get_device_name(CUDA)}, torch {torch.__version__}")
    _attention_lines()
    cells = []
    for case in CASES:
        if told.only not in case.words:
            continue
        cell = _cell(case, capability, told.largest, idle)
        cells.append(cell)
        if told.json:
            with open(told.json, "a") as file:
                file.write(json.dumps(cell) + "\n")
    _summary([cell for cell in cells if "error" in cell])
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


def _line(case: Case, planned: Planned, cell: dict[str, Any], seconds: float) -> str:
    seen, gib = cell["measured"], lambda size: f"{size / GIB:.2f}"
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
    _clear()
    before = torch.cuda.memory_allocated(CUDA)
    model = _built(case)
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


def _built(case: Case) -> Decoder:
    told = AdapterConfig(method=case.method)
    with torch.device("meta"):
        model = Decoder(case.config, case.context, torch.bfloat16)
    if told.method != "off":
        adapters.freeze(model, told)
    ready.make_ready(model, ComputeConfig(), CUDA, lambda line: print(f"  {line}"))
    model.place(CUDA)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02) if parameter.dim() > 1 else parameter.fill_(1.0 - case.config.norm_offset)
    for _, layer in adapters._layers(model):
        if layer.weight is None:
            layer.quantized = tuple(_codes(rows, layer.in_features) for rows in layer.parts)
            layer.settle()
    if told.method != "off":
        adapters.attach(model, told, 0)
    for block in list(model.layers)[: case.recomputed]:
        ready.checkpoint_block(block, False, False)
    return model


def _codes(rows: int, inputs: int) -> nf4.Quantized:
    """Of random numbers: quantizing them takes longer than the rest."""
    blocks = rows * inputs // BLOCK
    codes = torch.randint(0, 256, (rows * inputs // 2,), dtype=torch.uint8, device=CUDA)
    scales = torch.full((blocks,), 128, dtype=torch.uint8, device=CUDA)
    second = torch.full((-(-blocks // SECOND_BLOCK),), 1e-3, device=CUDA)
    return nf4.Quantized(codes, scales, second, torch.full((), 0.05, device=CUDA), (rows, inputs), torch.bfloat16)


def _largest(case: Case, described: Described, job: Job, planned: Planned) -> dict[str, Any]:
    """Under a cap with place for a sample and a half more than the case has: is the planned largest micro-batch true?"""
    more = predict(described, replace(job, micro=job.micro + 2)).total - planned.total
    cap = int(planned.total + 0.75 * more) + (256 << 20)
    fits = max(m for m in range(1, 4 * job.micro + 4) if _needs(described, job, m) <= cap)
    total = torch.cuda.get_device_properties(CUDA).total_memory
    found = {}
    for micro in (fits, fits + 1):
        _clear()
        torch.cuda.set_per_process_memory_fraction(min(cap / total, 1.0), CUDA)
        try:
            with kernels("auto"):
                _measure(case, micro)
            found[micro] = True
        except torch.OutOfMemoryError:
            found[micro] = False
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, CUDA)
    verdict = {(True, False): "exact", (True, True): "below", (False, False): "above"}.get(
        (found[fits], found[fits + 1]), "?"
    )
    return {"largest": verdict, "cap": cap, "planned_largest": fits}


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


def _attention_lines() -> None:
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
            + ", ".join(f"{verdicts.count(kind)} {kind}" for kind in ("exact", "below", "above", "?"))
        )


if __name__ == "__main__":
    sys.exit(main())
