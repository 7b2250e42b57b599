"""Causes oom.gpu*: a rank ran out of GPU memory.

The cause depends on which process holds the memory. For a sharded model (FSDP) the advice depends on the phase of the
step, which the traceback shows.
"""

from __future__ import annotations

import re
import shlex
from typing import Any

from stoker.contract.evidence import RankExit
from stoker.contract.frozen import frozen
from stoker.contract.units import format_bytes
from stoker.control.verdict.catalogue import Case, CauseMatch, Family
from stoker.control.verdict.exit_text import (
    at_location,
    extract_searched_text,
    find_in_output,
    last_seen_at,
    line_of,
    location,
)

ORDER = 25

# ---- the phase of a step ----

GATHER, BACKWARD, OPTIMIZER, SAVE = "gather", "backward", "optimizer", "save"
_FRAME = re.compile(r'^ *File "([^"\n]{1,400})", line \d+, in ([^\n]{1,200})$', re.MULTILINE)
# The files and functions of each phase. The first phase in _PHASES with one of them in the traceback is chosen: a save and a
# backward pass gather weights, too.
_PHASES = (SAVE, GATHER, OPTIMIZER, BACKWARD)
_FILES = {
    SAVE: r"torch/distributed/checkpoint/|_state_dict_utils|state_dict_utils|torch/serialization|safetensors/|"
    r"stoker/training/checkpoint/|stoker/training/model/(?:hf_write|hf_stream|pieces)",
    OPTIMIZER: r"torch/optim/|stoker/training/optim/|bitsandbytes/optim/",
}
_FUNCTIONS = {
    SAVE: r"full_tensor|(?:get_|_)?(?:model_|optimizer_|full_)?state_dict|save(?:_pretrained|_model|_checkpoint)?",
    GATHER: r"(?:pre_|wait_for_|_)?unshard|foreach_all_gather\w*|all_gather_\w+|init_all_gather_outputs|alloc_all_gather_outputs|"
    r"_all_gather_flat_param|_alloc_padded_unsharded_flat_param",
    BACKWARD: r"_engine_run_backward|post_backward|foreach_reduce",
}
_SHARDED = re.compile(r"torch/distributed/fsdp/|torch/distributed/tensor/|deepspeed/")
_STOKER_SHARDED = re.compile(r"ran out of GPU memory at [^\n]{0,60} of a model in (\d+) shards")  # recipes/memory.py
_PHASE_TEXTS = {
    GATHER: "while weights were gathered",
    BACKWARD: "in the backward pass",
    OPTIMIZER: "in the optimizer step",
    SAVE: "while the model was saved",
}
# (advice for `stoker train`, advice for any other script)
_PHASE_ADVICE = {
    GATHER: (
        "--compute.recompute full, or a smaller --batch.micro: activations and two gathered blocks are in memory at the same"
        " time; with --qlora a gathered block takes a quarter of its 16-bit size; with `--parallel.offload all` shards are in"
        " host memory",
        "fully_shard every block, the embedding and the head separately, with reshard_after_forward=True: each such unit is"
        " gathered as a whole; then activation checkpointing",
    ),
    BACKWARD: (
        "--parallel.accumulate sharded (no rank holds full gradients between micro-batches), then --compute.recompute full",
        "don't set_requires_gradient_sync(False) while accumulating: every rank then holds full gradients; then activation"
        " checkpointing",
    ),
    OPTIMIZER: (
        "--optimizer adamw8bit: 2 bytes of moments per parameter instead of 8; or --parallel.offload optimizer: moments in host"
        " memory",
        "an 8-bit optimizer, or fully_shard(..., offload_policy=CPUOffloadPolicy()): moments in host memory",
    ),
    SAVE: (
        "leave more GPU memory free in a step: --compute.recompute full, or a smaller --batch.micro; a save gathers one tensor"
        " at a time",
        "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)), or"
        " torch.distributed.checkpoint.save, which keeps shards; on every rank",
    ),
}  # fmt: skip


@frozen
class StepPhase:
    """The phase of a training step in which memory ran out."""

    name: str
    advice: str  # "" if the model is not known to be sharded

    @property
    def text(self) -> str:
        return _PHASE_TEXTS[self.name]


def find_phase(end: RankExit) -> StepPhase | None:
    """Return the phase that the traceback shows, or None if it is unknown or the forward pass."""
    frames = _FRAME.findall(end.error.traceback if end.error is not None else "")
    name = next((name for name in _PHASES if _is_in_phase(name, frames)), None)
    uses_fsdp = any(_SHARDED.search(file) for file, _ in frames)
    if name is None or (name == GATHER and not uses_fsdp):  # without FSDP the script itself called all_gather
        return None
    by_stoker = _STOKER_SHARDED.search(end.tail) is not None
    for_stoker, for_scripts = _PHASE_ADVICE[name]
    if by_stoker:
        return StepPhase(name, for_stoker)
    return StepPhase(name, for_scripts if uses_fsdp else "")


def _is_in_phase(name: str, frames: list[tuple[str, str]]) -> bool:
    files, functions = _FILES.get(name), _FUNCTIONS.get(name)
    return any(
        (files is not None and re.search(files, file)) or (functions is not None and re.fullmatch(functions, function))
        for file, function in frames
    )


# ---- torch's out-of-memory message ----

# From torch 2.9 on (CUDA, HIP and XPU): CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of
# 139.80 GiB of which 1.00 GiB is free. Process 727 has 100.51 GiB memory in use. Including non-PyTorch memory, this
# process has 38.10 GiB memory in use. 130.00 GiB allowed; Of the allocated memory 30.00 GiB is allocated by PyTorch,
# with 1.00 GiB allocated in private pools (e.g., CUDA Graphs), and 7.00 GiB is reserved by PyTorch but unallocated.
_SIZE = r"([\d.]+) (bytes|[KMGT]iB)"
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@frozen
class AllocationFailure:
    """The numbers of torch's out-of-memory message. A number that the message leaves out is None."""

    needed: int
    total: int | None
    free: int | None
    own: int | None  # held by this process, with its CUDA context
    others: tuple[tuple[int, int], ...]  # (pid, bytes)
    allowed: int | None  # torch.cuda.set_per_process_memory_fraction
    allocated: int | None
    unused: int | None  # reserved by torch's allocator but not allocated

    @property
    def reserved(self) -> int:
        """Return all that torch's allocator holds."""
        return (self.allocated or 0) + (self.unused or 0)


def parse_out_of_memory(text: str) -> AllocationFailure | None:
    head = re.search(rf"(?:CUDA|HIP|XPU) out of memory\. Tried to allocate {_SIZE}", text)
    if head is None:
        return None
    text = text[head.start() :]
    processes = re.findall(rf"Process (\d+) has {_SIZE} memory in use", text)
    others = tuple((int(pid), _to_bytes(count, unit)) for pid, count, unit in processes)
    allocated = _find_size(text, rf"Of the allocated memory {_SIZE}")
    unused = _find_size(text, rf"{_SIZE} is reserved by PyTorch but unallocated")
    own = _find_size(text, rf"this process has {_SIZE} memory in use")
    if own is None and allocated is not None:
        # In a container the driver reports the host's pids, so torch's message lists its own process as another one.
        candidates = [process for process in others if process[1] >= allocated + (unused or 0)]
        if candidates:
            smallest = min(candidates, key=lambda process: process[1])
            own = smallest[1]
            others = tuple(process for process in others if process != smallest)
    return AllocationFailure(
        _to_bytes(head[1], head[2]),
        _find_size(text, rf"total capacity of {_SIZE}"),
        _find_size(text, rf"of which {_SIZE} is free"),
        own,
        others,
        _find_size(text, rf"{_SIZE} allowed;"),
        allocated,
        unused,
    )


def _find_size(text: str, pattern: str) -> int | None:
    match = re.search(pattern, text)
    return _to_bytes(match[1], match[2]) if match else None


def _to_bytes(count: str, unit: str) -> int:
    return int(float(count) * _UNITS[unit])


# ---- the causes ----

_EXPANDABLE = "PYTORCH_ALLOC_CONF=expandable_segments:True (before torch 2.10: PYTORCH_CUDA_ALLOC_CONF)"
_WITHOUT_NUMBERS = (
    r"(?:CUDA|HIP) error: out of memory|(?:CUBLAS|CUDNN|HIPBLAS|CUFFT)_STATUS_ALLOC_FAILED|Cuda failure(?: \d+)? 'out"
    r" of memory'"
)
_SLACK = 2**30  # CUDA contexts and the driver's own memory: too little to blame a process for
_MIN_FRAGMENTED = 2**29  # with less than this unused in torch's cache the GPU is full rather than fragmented
_SMALLER = (
    "a chunked or fused loss, so that the logits of all tokens never exist at the same time (liger-kernel's fused linear"
    " cross-entropy)",
    "activation checkpointing (gradient_checkpointing_enable(), torch.utils.checkpoint)",
    "half the micro-batch with twice the accumulation steps: the global batch and the result stay the same",
    "an 8-bit optimizer (bitsandbytes AdamW8bit): 2 bytes of state per parameter instead of 8",
    "shard parameters, gradients and optimizer over the ranks (FSDP: torch.distributed.fsdp.fully_shard)",
    "last, a shorter sequence: it changes what is learned",
)
# An item of _SMALLER is given as advice only if its pattern is in the rank's last output or its traceback.
_LANGUAGE_MODEL = r"(?i)logits|cross_entropy|lm_head|log_softmax|nll_loss|/transformers/|stoker/training/"
_LAYERS = (
    r"torch/nn/modules/|torch/autograd/|_engine_run_backward|torch/utils/checkpoint|/transformers/|stoker/training/"
)
_OPTIMIZER = r"torch/optim/|bitsandbytes/optim/|stoker/training/"
_FREE_MEMORY = (
    "stoker clean   # shows what your own dead runs still hold; --yes frees it; other processes are not touched",
    "stoker run --gpus any:N --min-free-memory SIZE --wait 10m   # picks GPUs with enough free memory, or waits for them",
    "if it is held from outside this container, ask the other users of the machine, or the provider",
)
family = Family(__name__, EXPANDABLE=_EXPANDABLE, SMALLER=_SMALLER, FREE_MEMORY=_FREE_MEMORY)


class GpuMemory:
    """Which processes held a GPU's memory when an allocation failed, from torch's message and the agent's list."""

    def __init__(self, case: Case, failure: AllocationFailure | None) -> None:
        context = case.context
        rank_pids = {end.pid for end in case.evidence.ends if end.host == case.end.host}
        self.holders: list[dict[str, Any]] = [
            holder for holder in context.holders if not holder.get("ours") and holder.get("pid") not in rank_pids
        ]
        own_holders = [holder for holder in context.holders if holder.get("ours") or holder.get("pid") in rank_pids]
        self.failure = failure
        self.total = (failure.total if failure else None) or context.gpu_total
        own_pids = {holder.get("pid") for holder in own_holders} | rank_pids
        # Use the processes of torch's message only if the agent found none: the agent's list also has names.
        self.unnamed: list[tuple[int, int]] = []
        if failure and not self.holders:
            self.unnamed = [process for process in failure.others if process[0] not in own_pids]
        self.foreign = sum(holder.get("memory") or 0 for holder in self.holders)
        self.foreign = self.foreign or sum(size for _, size in self.unnamed)
        shares_gpu = any(
            end.label == case.end.label and end.host == case.end.host and end.rank != case.end.rank
            for end in case.evidence.ends
        )
        if failure and not self.foreign and not shares_gpu and failure.total is not None and failure.free is not None:
            # Processes that neither the agent nor torch can see hold the memory that no visible process uses. If ranks
            # share the GPU (--share-gpus), it may belong to another rank, so don't count it.
            siblings = sum(holder.get("memory") or 0 for holder in own_holders if holder.get("pid") != case.end.pid)
            siblings += sum(size for pid, size in failure.others if pid in own_pids)
            unexplained = failure.total - failure.free - (failure.own or failure.reserved + _SLACK) - siblings
            self.foreign = max(0, unexplained) if unexplained > _SLACK else 0

    @property
    def foreign_decides(self) -> bool:
        """Return whether the allocation would have fitted without other processes; a desktop's few MiB don't count."""
        if self.foreign < max(_SLACK, (self.total or 0) // 20):
            return False
        failure = self.failure
        if failure is None:
            return self.total is not None and self.foreign * 2 >= self.total
        if failure.allowed is not None and failure.reserved + failure.needed > failure.allowed:
            return False
        fits_without_others = failure.needed <= (failure.free or 0) + self.foreign
        return fits_without_others and (failure.own or failure.reserved) + failure.needed <= (self.total or 0)

    def describe_holders(self) -> list[str]:
        lines = []
        for holder in self.holders:
            memory = format_bytes(holder["memory"]) if holder.get("memory") else "an unknown amount"
            if not holder.get("command"):
                lines.append(f"pid {holder.get('pid')} holds {memory}, from outside this container")
                continue
            run = f", run {holder['run']}" if holder.get("run") else ""
            user = f", user {holder['user']}" if holder.get("user") else ""
            lines.append(f"pid {holder.get('pid')} ({holder['command']}{user}{run}) holds {memory}")
        lines += [f"pid {pid} holds {format_bytes(size)}" for pid, size in self.unnamed]
        if not lines and self.foreign:
            unseen = "processes that can't be seen from here, outside this container"
            lines.append(f"{format_bytes(self.foreign)} are held by {unseen}")
        return lines

    def describe_failure(self) -> str:
        failure = self.failure
        if failure is None:
            return "an allocation failed"
        parts = [f"{format_bytes(failure.needed)} needed"]
        if failure.free is not None:
            total = f" of {format_bytes(failure.total)}" if failure.total else ""
            parts.append(f"{format_bytes(failure.free)}{total} free")
        if failure.unused is not None:
            parts.append(f"{format_bytes(failure.unused)} reserved and unused")
        return ", ".join(parts)


def _examine_memory(case: Case) -> tuple[GpuMemory, tuple[str, ...]] | None:
    """Return (the GPU's memory, evidence) if the rank ran out of GPU memory, else None."""
    text = extract_searched_text(case)
    failure = parse_out_of_memory(text)
    match = None if failure else find_in_output(case, _WITHOUT_NUMBERS)
    if failure is None and match is None:
        return None
    memory = GpuMemory(case, failure)
    line = line_of(match) if match else next(line for line in text.splitlines() if "out of memory" in line)
    own = (f"this process held {format_bytes(failure.own)}",) if failure and failure.own else ()
    at = (f"at {location(case.end)}",) if case.end.error else ()
    line = line.partition(" If reserved but unallocated")[0]
    return memory, (line, *at, *own, *memory.describe_holders())


@family.cause("""
oom.gpu-foreign, again: Other processes hold the GPU's memory.
  seen: torch.OutOfMemoryError (or CUDA error 2, CUBLAS_STATUS_ALLOC_FAILED), and processes that are not this run's
      hold so much of the GPU's memory that the allocation would have fitted without them
  unless: others hold less than 1 GiB and 5 % of the GPU's memory, or it would not have fitted on an empty GPU either:
      oom.gpu
  fix: {FREE_MEMORY}
""")
def match_foreign_memory(case: Case) -> CauseMatch | None:
    examined = _examine_memory(case)
    if examined is None or not examined[0].foreign_decides:
        return None
    memory, evidence = examined
    stop_runs = tuple(
        f"stoker stop {shlex.quote(str(holder['run']))}   # if it is yours and not needed"
        for holder in memory.holders
        if holder.get("run")
    )
    holders = memory.describe_holders()
    more = f" and {len(holders) - 2} more" if len(holders) > 2 else ""
    held = f"{'; '.join(holders[:2])}{more}"
    summary = f"{case.rank_name}: other processes hold the GPU's memory: {memory.describe_failure()}; {held}"
    return CauseMatch(summary, evidence, (*stop_runs, *_FREE_MEMORY))


@family.cause("""
oom.gpu-fragmentation: The GPU had enough memory, but in pieces that are too small: torch's cache is fragmented.
  seen: torch.OutOfMemoryError, and torch's allocator has reserved at least as much as was needed without allocating
      it
  unless: less is reserved and unused than was needed, or less than 512 MiB: oom.gpu
  fix: {EXPANDABLE}   # stoker run --env NAME=VALUE sets it
  fix: shapes that vary from step to step fragment memory: pad or bucket the sequences, or pack them to one length
  fix: evaluation and saving between training steps: the same batch shape, or torch.cuda.empty_cache() once after them
""")
def match_fragmentation(case: Case) -> CauseMatch | None:
    examined = _examine_memory(case)
    if examined is None:
        return None
    memory, evidence = examined
    failure = memory.failure
    if failure is None or failure.unused is None or failure.unused < max(failure.needed, _MIN_FRAGMENTED):
        return None
    return CauseMatch(f"{case.rank_name}: GPU memory is fragmented: {memory.describe_failure()}", evidence)


@family.cause("""
oom.gpu: The model, the batch or the optimizer is too big for the GPU.
  seen: torch.OutOfMemoryError, CUDA error 2 (out of memory), CUBLAS_STATUS_ALLOC_FAILED, and neither other processes nor
      fragmentation explain it; for `stoker train` with a loaded model, which term of its memory plan was
      underestimated; the phase that the traceback shows (gather, backward, optimizer, save), with advice for it
      if the model is sharded (FSDP)
  unless: others hold the memory: oom.gpu-foreign; as much as needed is reserved and unused: oom.gpu-fragmentation
  fix: {SMALLER}
""")
def match_out_of_memory(case: Case) -> CauseMatch | None:
    examined = _examine_memory(case)
    if examined is None:
        return None
    memory, evidence = examined
    failure = memory.failure
    # `stoker train` prints which term of its memory plan was underestimated: quote the last such line.
    plan = re.findall(r"ran out of GPU memory at [^\n]{0,400}", case.end.tail)[-1:]
    evidence = (*evidence, *plan)
    phase = find_phase(case.end)
    summary = f"{case.rank_name}: out of GPU memory{f' {phase.text}' if phase else ''}"
    summary += at_location(case) or (f"; last seen at {last_seen_at(case)}" if last_seen_at(case) else "")
    advice = (phase.advice, *_choose_memory_advice(case)) if phase and phase.advice else _choose_memory_advice(case)
    if failure is None:
        return CauseMatch(summary, evidence, advice)
    summary += f": {memory.describe_failure()}"
    if failure.allowed is not None and failure.reserved + failure.needed > failure.allowed:
        allowed = format_bytes(failure.allowed)
        limit = f"the script limits itself to {allowed} (torch.cuda.set_per_process_memory_fraction)"
        return CauseMatch(f"{summary}; {limit}", evidence, (f"raise that limit: {limit}", *advice))
    if failure.free is not None and failure.free > failure.needed + _SLACK:
        limit = "a limit on address space (ulimit -v must print unlimited), or a slice or quota of the GPU"
        refusal = f"the driver refused although enough memory is free: {limit}"
        return CauseMatch(summary, (*evidence, refusal), (refusal, *advice))
    unused = failure.unused or 0
    if unused >= _MIN_FRAGMENTED and (failure.free or 0) + unused >= failure.needed:
        advice = (f"{_EXPANDABLE}: free plus reserved but unallocated memory would have been enough", *advice)
    underestimated = re.search(r"underestimated: [^;]*", plan[0]) if plan else None
    if underestimated:
        summary += f"; the memory plan {underestimated[0].replace(':', '', 1)}"
    return CauseMatch(summary, evidence, advice)


def _choose_memory_advice(case: Case) -> tuple[str, ...]:
    """Return the items of _SMALLER that apply to this program, as far as its output and traceback show."""
    error = case.end.error
    text = f"{error.traceback if error else ''}\n{case.output}"
    patterns = (_LANGUAGE_MODEL, _LAYERS, _OPTIMIZER)
    has_logits, has_layers, has_optimizer = (bool(re.search(pattern, text)) for pattern in patterns)
    is_sharded = _SHARDED.search(text) is not None
    trains = has_logits or has_layers or has_optimizer or case.end.steps > 0
    applies = (
        has_logits,
        has_layers,
        trains,
        has_optimizer or case.end.steps > 0,
        case.evidence.world_size > 1 and not is_sharded,
        has_logits,
    )
    advice = tuple(line for line, fits in zip(_SMALLER, applies, strict=True) if fits)
    return advice or (f"allocate less memory{at_location(case)}, or use a GPU with more",)
