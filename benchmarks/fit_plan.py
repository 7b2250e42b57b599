"""Planned against measured memory of a training step, for models of random weights on one GPU.

    PYTHONPATH=src python benchmarks/fit_plan.py [--json cells.jsonl] [--only REGEX] [--largest]

One line per configuration: what `stoker fit` plans, `max_memory_allocated`, the error, and the terms; beside it accelerate's
rule (four times the weights in their dtype) and LLaMA-Factory's table (18, 2 and 0.5 GB per billion parameters for full,
LoRA and 4-bit QLoRA). `--largest`: is the planned largest micro-batch, under a hard cap of memory, the true one? Shapes with
fewer layers than their model have are marked (L 4 of 48). Stages reward, dpo and grpo run their own modules: of grpo answers
are written by the engine with its CUDA graphs, then learned from. Each configuration has a process of its own: one that fails
is printed, and the others go on.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # as training sets it

import torch

from stoker.contract.shape import replace, shape
from stoker.training.fit.answers import ANSWERS, SCORES
from stoker.training.fit.cards import CONTEXT
from stoker.training.fit.footprint import Footprint
from stoker.training.fit.pairs import COMPARED
from stoker.training.fit.terms import (
    BACKWARD,
    DPO,
    FORWARD,
    GRPO,
    REWARD,
    SFT,
    STEP,
    Job,
    Planned,
    StageNeeds,
    reserved,
)  # fmt: skip
from stoker.training.generate.engine import Engine
from stoker.training.model import adapters, maps, nf4, ready
from stoker.training.model.attention import documents, kernels
from stoker.training.model.config import AdapterConfig, ModelConfig, parameters
from stoker.training.model.decoder import Decoder
from stoker.training.model.nf4_size import BLOCK, SECOND_BLOCK
from stoker.training.model.reference import Beginning, Reference, copied
from stoker.training.optim.config import OptimConfig
from stoker.training.optim.optimizer import Optimizer, gradient_norm
from stoker.training.parallel.config import ComputeConfig
from stoker.training.recipes import dpo
from stoker.training.reward.config import DpoConfig
from stoker.training.reward.model import RewardModel, score_ids
from stoker.training.reward.model import learner as reward_learner
from stoker.training.rl.update import Policy, Row, arrange, logprobs

LONGEST = 600  # seconds of one configuration
ATTENTION = -1  # in place of a configuration's number: what attention kernels allocate
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
    stage: str = "sft"
    likelihood: bool = True  # reward.likelihood
    rows: int = 0  # grpo: answers at once, and of a step
    new_tokens: int = 0
    scored: bool = False  # grpo: by a reward model of the same shape

    @property
    def needs(self) -> StageNeeds:
        found = StageNeeds(self.stage, self.likelihood, scorer=self.config if self.scored else None)
        if self.stage != GRPO:
            return found
        return replace(found, rows=self.rows, answers=self.rows, new_tokens=self.new_tokens)

    def job(self, capability: int, micro: int = 0) -> Job:
        micro = micro or self.micro
        adds = self.stage != GRPO or self.rows > micro
        return Job(
            micro, self.context, self.optimizer, self.packed or self.stage in (REWARD, DPO), 1, self.recomputed, 1, adds,
            capability, needs=self.needs,
        )  # fmt: skip

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
        stage = "" if self.stage == SFT else f" {self.stage}"
        stage += "" if self.likelihood else " without likelihood"
        stage += f" {self.rows} answers of {self.new_tokens}" if self.stage == GRPO else ""
        stage += " scored" if self.scored else ""
        return (
            f"{self.model}{short} {method} {self.micro}x{self.context} recompute {self.recompute}{packed}{kind}{stage}"
        )


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
    Case("smollm2-135m", "off", 4, 1024, stage=DPO), Case("tinyllama-1.1b", "off", 2, 1024, "some", stage=DPO),
    Case("tinyllama-1.1b", "lora", 4, 2048, stage=DPO), Case("llama-3.1-8b", "qlora", 1, 2048, "all", stage=DPO),
    Case("qwen2.5-0.5b", "off", 2, 2048, "all", stage=DPO), Case("gemma3-1b", "lora", 2, 2048, "some", stage=DPO),
    Case("smollm2-135m", "off", 4, 1024, stage=REWARD), Case("qwen3-0.6b", "lora", 4, 2048, "none", stage=REWARD),
    Case("tinyllama-1.1b", "qlora", 4, 2048, "all", stage=REWARD), Case("tinyllama-1.1b", "off", 2, 1024, stage=REWARD, likelihood=False),
    Case("smollm2-135m", "off", 8, 512, stage=GRPO, rows=32, new_tokens=256), Case("tinyllama-1.1b", "off", 4, 512, "some", stage=GRPO, rows=16, new_tokens=256),
    Case("tinyllama-1.1b", "lora", 8, 1024, stage=GRPO, rows=64, new_tokens=256), Case("tinyllama-1.1b", "qlora", 4, 1024, "all", stage=GRPO, rows=32, new_tokens=512),
    Case("qwen3-0.6b", "lora", 4, 1024, "some", stage=GRPO, rows=32, new_tokens=512), Case("llama-3.1-8b", "qlora", 2, 1024, "all", stage=GRPO, rows=16, new_tokens=512),
    Case("gemma3-1b", "lora", 4, 1024, "none", stage=GRPO, rows=16, new_tokens=256), Case("smollm2-135m", "off", 8, 512, stage=GRPO, rows=32, new_tokens=256, scored=True),
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="a line per configuration is added to this file")
    parser.add_argument("--only", default="", metavar="REGEX", help="configurations whose name it is found in")
    parser.add_argument("--largest", action="store_true", help="largest micro-batches under a cap of memory, too")
    parser.add_argument("--cell", type=int, help=argparse.SUPPRESS)  # in a process of its own: this configuration
    told = parser.parse_args()
    try:
        wanted = re.compile(told.only)
    except re.error as problem:
        print(f"fit_plan.py: --only {told.only}: {problem}", file=sys.stderr)
        return 64
    if told.cell is not None:
        return _child(told.cell, told.largest)
    if not torch.cuda.is_available():
        print("fit_plan.py: no GPU here", file=sys.stderr)
        return 69
    print(f"{_device_name()}, torch {torch.__version__}", flush=True)
    if not told.only:
        done = subprocess.run(_command(ATTENTION), capture_output=True, text=True, check=False, timeout=LONGEST)
        print(done.stdout + done.stderr[-500:], end="", flush=True)
    cells = []
    for number, case in enumerate(CASES):
        if not wanted.search(case.words):
            continue
        cell = _in_child(number, case, told.largest)
        cells.append(cell)
        if told.json:
            with open(told.json, "a") as file:
                file.write(json.dumps(cell) + "\n")
    _summary([cell for cell in cells if "error" in cell])
    failed = [cell for cell in cells if "error" not in cell]
    if failed:
        print(
            f"{len(failed)} without a measurement: "
            + "; ".join(f"{cell['case']} ({cell['failed']})" for cell in failed)
        )
    return 1 if failed else 0


def _device_name() -> str:
    """Without a context of this process on the card."""
    import pynvml

    pynvml.nvmlInit()
    return str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)))


def _command(number: int) -> list[str]:
    return [sys.executable, os.path.abspath(__file__), "--cell", str(number)]


def _in_child(number: int, case: Case, largest: bool) -> dict[str, Any]:
    """Its last line is the cell, its other lines are printed; nothing that it does ends this process."""
    command = [*_command(number), *(["--largest"] if largest else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONGEST)
    except subprocess.TimeoutExpired:
        print(f"{case.words}: more than {LONGEST} s", flush=True)
        return {"case": case.words, "failed": "too slow"}
    *lines, last = done.stdout.splitlines() or [""]
    for line in lines:
        print(line, flush=True)
    try:
        cell: dict[str, Any] = json.loads(last)
    except ValueError:
        cell = {}
    if done.returncode or "case" not in cell:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:200]
        print(f"{case.words}: failed: {why}", flush=True)
        return {"case": case.words, "failed": why}
    return cell


def _child(number: int, largest: bool) -> int:
    if number == ATTENTION:
        _attention_lines()
        return 0
    idle = _used()  # before there is a context of ours
    cell = _cell(CASES[number], torch.cuda.get_device_capability(CUDA)[0], largest, idle)
    print(json.dumps(cell), flush=True)
    return 0


def _planned(case: Case, job: Job) -> Planned:
    return Footprint(case.config, AdapterConfig(method=case.method), case.stage).planned(job)


def _cell(case: Case, capability: int, largest: bool, idle: int) -> dict[str, Any]:
    job = case.job(capability)
    planned = _planned(case, job)
    began = time.perf_counter()
    try:
        with kernels("auto"):
            seen = _measure(case, case.micro)
    except torch.OutOfMemoryError as problem:
        _clear()
        print(f"{case.words}: out of memory ({str(problem)[:80]})", flush=True)
        return {"case": case.words, "planned": planned.total, "failed": "out of memory"}
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
    more = _largest(case, job, planned) if largest else {}
    cell.update(more)
    _clear()
    print(_line(case, planned, cell, time.perf_counter() - began), flush=True)
    return cell


def _line(case: Case, planned: Planned, cell: dict[str, Any], seconds: float) -> str:
    seen, gib = cell["measured"], lambda size: f"{size / GIB:.2f}"
    phases = ", ".join(
        f"{name} {gib(planned.phases[phase])}/{gib(seen[name])}" for name, phase in PHASES if name in seen
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


PHASES = (
    ("answers", ANSWERS), ("scores", SCORES), ("compared", COMPARED), ("forward", FORWARD), ("backward", BACKWARD),
    ("step", STEP),
)  # fmt: skip


class Seen(dict[str, int]):
    """The highest point of each phase."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        torch.cuda.reset_peak_memory_stats(CUDA)
        yield
        torch.cuda.synchronize(CUDA)
        self[name] = max(self.get(name, 0), torch.cuda.max_memory_allocated(CUDA))

    def done(self) -> dict[str, int]:
        self["peak"] = max(self[name] for name, _ in PHASES if name in self)
        self["reserved"] = torch.cuda.memory_reserved(CUDA)
        return dict(self)


def _measure(case: Case, micro: int) -> dict[str, int]:
    """Two micro-batches, the second with the gradients of the first, and an optimizer step: as recipes/build.py tries. Of grpo
    a step as recipes/grpo.py makes it."""
    _clear()
    before = torch.cuda.memory_allocated(CUDA)
    model, reference = _policy(case)
    weights = torch.cuda.memory_allocated(CUDA)
    optimizer = Optimizer(model, OptimConfig(kind=case.optimizer))
    states = torch.cuda.memory_allocated(CUDA)
    seen = Seen(before=before, weights=weights - before, optimizer=states - weights)
    if case.stage == GRPO:
        return _measure_grpo(case, micro, model, reference, optimizer, seen)
    inputs = torch.randint(0, case.config.vocab_size, (micro, case.context), device=CUDA)
    targets = inputs % inputs.shape[1]
    packs = case.packed or case.stage != SFT
    for _ in range(2):
        packed = documents(torch.zeros(inputs.shape, dtype=torch.int32) if packs else None, CUDA)
        with seen.phase("forward"):
            loss = model(inputs, targets, torch.zeros((), device=CUDA), packed)
        with seen.phase("backward"):
            loss.backward()
            del loss
    with seen.phase("step"):
        optimizer.step(0.0, gradient_norm(optimizer.parameters), torch.ones((), device=CUDA))
    return seen.done()


def _measure_grpo(
    case: Case, micro: int, model: Decoder, reference: Reference, optimizer: Optimizer, seen: Seen
) -> dict[str, int]:
    """Two steps: only then everything is there that a step finds. Every answer has all its tokens."""
    judge = _scorer(case) if case.scored else None
    engine = Engine(model, rows=case.rows, length=case.context)
    policy = Policy(model, temperature=1.0, clip_ratio=0.2, kl=0.02)
    prompt, words = case.context - case.new_tokens, case.config.vocab_size
    for step in range(2):
        with seen.phase("answers"):
            asked = [[number + 1] * prompt for number in range(case.rows)]
            written = engine.generate(asked, new_tokens=case.new_tokens, stop=(), seed=step)
        if judge is not None:
            with seen.phase("scores"):
                score_ids(judge, [([*ids, *own], prompt) for ids, own in zip(asked, written, strict=True)], CUDA, micro)
        rows = [Row(tuple(ids), tuple(own), 1.0) for ids, own in zip(asked, written, strict=True)]
        assert all(len(row.answer) == case.new_tokens and max(row.answer) < words for row in rows)
        batches = arrange(rows, micro, case.context, CUDA)
        with seen.phase("compared"), torch.no_grad():
            for number, batch in enumerate(batches):
                with reference() as then:
                    batches[number] = replace(batch, reference=logprobs(then, batch, 1.0)[0])
        for batch in batches:
            with seen.phase("forward"):
                loss, told = policy(batch, 0.0)
            with seen.phase("backward"):
                loss.backward()
                del loss, told
        with seen.phase("step"):
            optimizer.step(0.0, gradient_norm(optimizer.parameters), torch.ones((), device=CUDA))
        del batch, batches
        optimizer.zero()
        with seen.phase("answers"):
            engine.refresh()
    return seen.done()


def _policy(case: Case) -> tuple[Decoder, Reference]:
    """(what learns, what it is compared with where the stage does that)."""
    told = AdapterConfig(method=case.method)
    if case.stage == REWARD:
        model = _built(case, told, reward_learner(case.likelihood).kind)
        return model, copied(model)
    if case.stage == SFT:
        model = _built(case, told, Decoder)
        return model, copied(model)
    then: Decoder | None = None
    if case.method == "off":
        kind = dpo.Reference if case.stage == DPO else Decoder
        then = _built(case, told, kind, torch.bfloat16).requires_grad_(False).eval()
    learns: Any = _built(case, told, dpo.learner(then, DpoConfig()).kind if case.stage == DPO else Decoder)
    reference = Beginning(learns, loaded=False) if then is None else copied(then)
    if case.stage == DPO and then is None:
        learns.begun = reference
    return learns, reference


def _scorer(case: Case) -> RewardModel:
    """As grpo opens one: weights in fp32, blocks of plain torch."""
    with torch.device("meta"):
        model = RewardModel(case.config, case.context, torch.bfloat16)
    model.place(CUDA)
    _fill(model, case)
    return model.eval()


@torch.no_grad()
def _fill(model: Decoder, case: Case) -> None:
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.02) if parameter.dim() > 1 else parameter.fill_(1.0 - case.config.norm_offset)


def _built(case: Case, told: AdapterConfig, kind: type[Decoder], stored: torch.dtype | None = None) -> Decoder:
    """`stored`: of all weights, where nothing learns."""
    with torch.device("meta"):
        model = kind(case.config, case.context, torch.bfloat16)
        if stored is not None:
            model = model.to(stored)
    if told.method != "off":
        adapters.freeze(model, told)
    ready.make_ready(model, ComputeConfig(), CUDA, lambda line: print(f"  {line}"))
    model.place(CUDA)
    _fill(model, case)
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


def _largest(case: Case, job: Job, planned: Planned) -> dict[str, Any]:
    """Under a cap with place for a sample and a half more than the case has: is the planned largest micro-batch true?"""
    if case.stage == GRPO:
        return {}  # its micro-batch is at most a step's answers
    more = _planned(case, replace(job, micro=job.micro + 2)).total - planned.total
    cap = int(planned.total + 0.75 * more) + (256 << 20)
    fits = max(m for m in range(1, 4 * job.micro + 4) if _needs(case, job, m) <= cap)
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


def _needs(case: Case, job: Job, micro: int) -> int:
    return reserved(_planned(case, replace(job, micro=micro)).total)


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
