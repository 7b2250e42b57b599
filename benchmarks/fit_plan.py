"""Planned against measured memory of a training step, for models of random weights on one GPU.

    PYTHONPATH=src python benchmarks/fit_plan.py [--json cells.jsonl] [--only REGEX] [--largest]

One line per configuration: what `stoker fit` plans, `max_memory_allocated`, the error, and the terms; beside it accelerate's
rule (four times the weights in their dtype) and LLaMA-Factory's table (18, 2 and 0.5 GB per billion parameters for full,
LoRA and 4-bit QLoRA). `--largest`: is the planned largest micro-batch, under a hard cap of memory, the true one? It and its
neighbours are tried. Shapes with fewer layers than their model have are marked (L 4 of 48). Stages reward, dpo and grpo run
their own modules: of grpo answers are written by the engine with its CUDA graphs, then learned from. Every configuration is a
process of its own: one that fails is printed, and the others go on.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # as training sets it

import torch
from shapes import SHAPES, built, fill

from stoker.contract.frozen import frozen, replace
from stoker.training.fit.answers import ANSWERS, SCORES
from stoker.training.fit.cards import Card
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
from stoker.training.model import maps
from stoker.training.model.attention import documents, kernels
from stoker.training.model.config import AdapterConfig, ModelConfig, parameters
from stoker.training.model.decoder import Decoder
from stoker.training.model.reference import Beginning, Reference, copied
from stoker.training.optim.config import OptimConfig
from stoker.training.optim.optimizer import Optimizer, gradient_norm
from stoker.training.parallel.config import recompute_word
from stoker.training.recipes import dpo
from stoker.training.reward.config import DpoConfig
from stoker.training.reward.model import RewardModel, score_ids
from stoker.training.reward.model import learner as reward_learner
from stoker.training.rl.update import Policy, Row, arrange, logprobs
from stoker.training.serve.batch import BatchEngine

LONGEST = 600  # seconds of one configuration
GIB = 1 << 30
CUDA = torch.device("cuda", 0)
CELL, ATTENTION = "CELL ", "attention"  # how a child's result begins; the child that looks at attention kernels
EXACT, ONE_BELOW, BELOW, ABOVE = "exact", "one below", "below", "above"
FAR = 3  # samples above the planned micro-batch that are tried


@frozen
class Case:
    model: str
    method: str  # off (full), lora, qlora
    micro: int
    context: int
    recompute: str = (
        "none"  # none, some, all; mlp, most-mlp: the first product of the MLP in all or two thirds of the blocks
    )
    packed: bool = False
    optimizer: str = "adamw"
    layers: int = 0  # fewer than the model has
    stage: str = "sft"
    likelihood: bool = True  # reward.likelihood
    rows: int = 0  # grpo: answers at once, and of a step
    new_tokens: int = 0
    bits: int = 16  # grpo: of a weight while answers are written
    scored: bool = False  # grpo: by a reward model of the same shape

    @property
    def needs(self) -> StageNeeds:
        found = StageNeeds(self.stage, self.likelihood, scorer=self.config if self.scored else None)
        if self.stage != GRPO:
            return found
        return replace(found, rows=self.rows, answers=self.rows, new_tokens=self.new_tokens, bits=self.bits)

    def job(self, capability: int, micro: int = 0) -> Job:
        micro = micro or self.micro
        adds = self.stage != GRPO or self.rows > micro
        return Job(
            micro, self.context, self.optimizer, self.packed or self.stage in (REWARD, DPO), 1, self.recomputed, 1, adds,
            capability, needs=self.needs, mlp=self.mlp,
        )  # fmt: skip

    @property
    def config(self) -> ModelConfig:
        c = SHAPES[self.model]
        return replace(c, layers=self.layers, windows=c.windows[: self.layers]) if self.layers else c

    @property
    def recomputed(self) -> int:
        return {"some": self.config.layers // 2, "all": self.config.layers}.get(self.recompute, 0)

    @property
    def mlp(self) -> int:
        return {"mlp": self.config.layers, "most-mlp": self.config.layers * 2 // 3}.get(self.recompute, 0)

    @property
    def words(self) -> str:
        short = f" (L {self.layers} of {SHAPES[self.model].layers})" if self.layers else ""
        method = {"off": "full"}.get(self.method, self.method)
        packed = " packed" if self.packed else ""
        kind = "" if self.optimizer == "adamw" else f" {self.optimizer}"
        stage = "" if self.stage == SFT else f" {self.stage}"
        stage += "" if self.likelihood else " without likelihood"
        stage += f" {self.rows} answers of {self.new_tokens}" if self.stage == GRPO else ""
        stage += " by 4-bit weights" if self.bits == 4 else ""
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
    Case("tinyllama-1.1b", "qlora", 4, 2048, "most-mlp"), Case("llama-3.1-8b", "lora", 2, 2048, "mlp", True),
    Case("qwen3-0.6b", "off", 4, 2048, "mlp"), Case("mistral-7b", "qlora", 2, 2048, "most-mlp", True),
    Case("smollm2-135m", "off", 4, 1024, stage=DPO), Case("tinyllama-1.1b", "off", 2, 1024, "some", stage=DPO),
    Case("tinyllama-1.1b", "lora", 4, 2048, stage=DPO), Case("llama-3.1-8b", "qlora", 1, 2048, "all", stage=DPO),
    Case("qwen2.5-0.5b", "off", 2, 2048, "all", stage=DPO), Case("gemma3-1b", "lora", 2, 2048, "some", stage=DPO),
    Case("smollm2-135m", "off", 4, 1024, stage=REWARD), Case("qwen3-0.6b", "lora", 4, 2048, "none", stage=REWARD),
    Case("tinyllama-1.1b", "qlora", 4, 2048, "all", stage=REWARD), Case("tinyllama-1.1b", "off", 2, 1024, stage=REWARD, likelihood=False),
    Case("smollm2-135m", "off", 8, 512, stage=GRPO, rows=32, new_tokens=256), Case("tinyllama-1.1b", "off", 4, 512, "some", stage=GRPO, rows=16, new_tokens=256),
    Case("tinyllama-1.1b", "lora", 8, 1024, stage=GRPO, rows=64, new_tokens=256), Case("tinyllama-1.1b", "qlora", 4, 1024, "all", stage=GRPO, rows=32, new_tokens=512),
    Case("qwen3-0.6b", "lora", 4, 1024, "some", stage=GRPO, rows=32, new_tokens=512), Case("llama-3.1-8b", "qlora", 2, 1024, "all", stage=GRPO, rows=16, new_tokens=512),
    Case("gemma3-1b", "lora", 4, 1024, "none", stage=GRPO, rows=16, new_tokens=256), Case("smollm2-135m", "off", 8, 512, stage=GRPO, rows=32, new_tokens=256, scored=True),
    Case("tinyllama-1.1b", "qlora", 4, 1024, "all", stage=GRPO, rows=32, new_tokens=512, bits=4), Case("llama-3.1-8b", "qlora", 2, 1024, "all", stage=GRPO, rows=16, new_tokens=512, bits=4),
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="a line per configuration is added to this file")
    parser.add_argument("--only", default="", metavar="REGEX", help="configurations whose name it is found in")
    parser.add_argument("--largest", action="store_true", help="largest micro-batches under a cap of memory, too")
    parser.add_argument("--attention", action="store_true", help="what attention kernels allocate, too")
    parser.add_argument(
        "--together",
        type=int,
        default=1,
        metavar="N",
        help="configurations at a time, on a GPU as large as all of them",
    )
    parser.add_argument("--seconds", type=float, default=540.0, help="no configuration begins later than this")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)  # in a process of its own: this configuration
    told = parser.parse_args()
    try:
        wanted = re.compile(told.only)
    except re.error as problem:
        print(f"fit_plan.py: --only {told.only}: {problem}", file=sys.stderr)
        return 64
    if not torch.cuda.is_available():
        print("fit_plan.py: no GPU here", file=sys.stderr)
        return 69
    if told.one == ATTENTION:
        return _attention_lines()
    if told.one:
        return _one(CASES[int(told.one)], told.largest)
    print(f"{_device_name()}, torch {torch.__version__}", flush=True)
    cells, began = [], time.monotonic()
    if told.attention:
        subprocess.run([sys.executable, __file__, "--one", ATTENTION], check=False, timeout=LONGEST)

    def measured(at: int) -> dict[str, Any] | None:
        return None if time.monotonic() - began > told.seconds else _apart(at, told.largest)

    with ThreadPoolExecutor(told.together) as pool:
        for cell in pool.map(measured, [at for at, case in enumerate(CASES) if wanted.search(case.words)]):
            if cell is None:
                continue
            cells.append(cell)
            if told.json:
                with open(told.json, "a") as file:
                    file.write(json.dumps(cell) + "\n")
    _summary([cell for cell in cells if "error" in cell])
    failed = [cell for cell in cells if "error" not in cell]
    print(f"{len(cells)} configurations in {time.monotonic() - began:.0f} s; without a result: {len(failed)}")
    for cell in failed:
        print(f"  {cell['case']}: {cell['failed']}")
    return 1 if failed else 0


def _device_name() -> str:
    """Without a context of this process on the card."""
    import pynvml

    pynvml.nvmlInit()
    return str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)))


def _apart(at: int, largest: bool) -> dict[str, Any]:
    """In a process of its own: no fragments, buffers or kernels of the configuration before, and none that ends this one."""
    argv = [sys.executable, __file__, "--one", str(at), *(["--largest"] if largest else [])]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=LONGEST)
    except subprocess.TimeoutExpired:
        return {"case": CASES[at].words, "failed": f"more than {LONGEST} s"}
    why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:200]
    cell: dict[str, Any] = {"case": CASES[at].words, "failed": why}
    for line in done.stdout.splitlines():
        if line.startswith(CELL):
            cell = json.loads(line.removeprefix(CELL))
        else:
            print(line, flush=True)
    return cell


def _one(case: Case, largest: bool) -> int:
    capability = torch.cuda.get_device_capability(CUDA)[0]
    print(CELL + json.dumps(_cell(case, capability, largest)), flush=True)
    return 0


def _planned(case: Case, job: Job) -> Planned:
    return Footprint(case.config, AdapterConfig(method=case.method), case.stage).planned(job)


def _cell(case: Case, capability: int, largest: bool) -> dict[str, Any]:
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
    seen["device"] = _used()
    billions = parameters(case.config) / 1e9
    rules = {"accelerate": 4e9 * billions * {"off": 4, "lora": 2, "qlora": 0.5}[case.method]}
    rules["llama_factory"] = 1e9 * billions * {"off": 18, "lora": 2, "qlora": 0.5}[case.method]
    cell: dict[str, Any] = {
        "case": case.words, "planned": planned.total, "peak": seen["peak"], "error": error, "terms": planned.terms,
        "phases": planned.phases, "measured": seen,
        "planned_device": reserved(planned.total) + _context(), **{name: int(value) for name, value in rules.items()},
    }  # fmt: skip
    more = _largest(case, job, planned) if largest else {}
    cell.update(more)
    _clear()
    print(_line(case, planned, cell, time.perf_counter() - began), flush=True)
    return cell


def _context() -> int:
    return Card(torch.cuda.get_device_name(CUDA), 0, 0).takes


def gib(size: float) -> str:
    return f"{size / GIB:.2f}"


def _line(case: Case, planned: Planned, cell: dict[str, Any], seconds: float) -> str:
    seen = cell["measured"]
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
    engine = BatchEngine(model, rows=case.rows, length=case.context, codes=case.bits == 4)
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
    told, again = AdapterConfig(method=case.method), recompute_word(case.recomputed, case.mlp, case.config.layers)
    make = functools.partial(built, case.config, told, case.context, again, quick=True)
    if case.stage in (SFT, REWARD):
        model = make(kind=reward_learner(case.likelihood).kind if case.stage == REWARD else Decoder)
        return model, copied(model)
    then: Decoder | None = None
    if case.method == "off":
        then = make(kind=dpo.Reference if case.stage == DPO else Decoder).to(torch.bfloat16)
        then.requires_grad_(False).eval()
        _clear()
    learns: Any = make(kind=dpo.learner(then, DpoConfig()).kind if case.stage == DPO else Decoder)
    reference = Beginning(learns, loaded=False) if then is None else copied(then)
    if case.stage == DPO and then is None:
        learns.begun = reference
    return learns, reference


def _scorer(case: Case) -> RewardModel:
    """As grpo opens one: weights in fp32, blocks of plain torch."""
    with torch.device("meta"):
        model = RewardModel(case.config, case.context, torch.bfloat16)
    model.place(CUDA)
    fill(model)
    return model.eval()


def _largest(case: Case, job: Job, planned: Planned) -> dict[str, Any]:
    """Under a cap with place for a sample and a half more than the case has: is the planned largest micro-batch the true one?"""
    if case.stage == GRPO:
        return {}  # its micro-batch is at most a step's answers
    more = _planned(case, replace(job, micro=job.micro + 2)).total - planned.total
    cap = reserved(int(planned.total + 0.75 * more))
    fits = max(m for m in range(1, 4 * job.micro + 4) if _needs(case, job, m) <= cap)
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


def _needs(case: Case, job: Job, micro: int) -> int:
    return reserved(_planned(case, replace(job, micro=micro)).total)


def _used() -> int:
    """Bytes that this process has on the card, by NVML; 0 where it does not say."""
    import pynvml

    pynvml.nvmlInit()
    there = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(0))
    return next((int(one.usedGpuMemory or 0) for one in there if one.pid == os.getpid()), 0)


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
    listed = [cell for cell in cells if cell["measured"]["device"]]
    print(
        f"device memory by NVML: of {len(listed)} configurations"
        + ("" if listed else ", whose processes it does not list")
    )
    if listed:
        devices = sorted(abs(cell["planned_device"] / cell["measured"]["device"] - 1) for cell in listed)
        contexts = [cell["measured"]["device"] - cell["measured"]["reserved"] for cell in listed]
        print(f"  median {statistics.median(devices):.2%}, worst {devices[-1]:.2%}; beside the allocator's")
        print(f"  {min(contexts) / GIB:.2f} to {max(contexts) / GIB:.2f} GiB (planned {_context() / GIB:.2f})")
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
