"""oom.gpu*: the card's memory. Who holds it decides which of the three it is, and the traceback in which phase of
a step it was full: what helps depends on that where the model is in shards."""

from __future__ import annotations

import re
import shlex
from typing import Any

from stoker.contract.evidence import RankExit
from stoker.contract.frozen import frozen
from stoker.contract.units import format_bytes
from stoker.control.verdict.catalogue import Case, CauseMatch, Family
from stoker.control.verdict.exit_text import at, find, last_seen, line_of, place, said

GATHER, BACKWARD, OPTIMIZER, SAVE = "gather", "backward", "optimizer", "save"
_FRAME = re.compile(r'^ *File "([^"\n]{1,400})", line \d+, in ([^\n]{1,200})$', re.MULTILINE)
# Files and functions, innermost last; the first kind that a traceback has decides: a save gathers, a backward pass gathers, too.
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
_OWN = re.compile(r"ran out of GPU memory at [^\n]{0,60} of a model in (\d+) shards")  # recipes/memory.py
_WORDS = {
    GATHER: "while weights were gathered",
    BACKWARD: "in the backward pass",
    OPTIMIZER: "in the optimizer step",
    SAVE: "while the model was saved",
}
# Of `stoker train`, and of anybody's script.
_HELPS = {
    GATHER: (
        "--compute.recompute full, or a smaller --batch.micro: activations and two gathered blocks are there at a time; with"
        " --qlora a gathered block is a quarter of its 16-bit size, with --parallel.offload all shards are in host memory",
        "fully_shard every block, the embedding and the head by itself, with reshard_after_forward=True: what is one unit is"
        " gathered at once; then activation checkpointing",
    ),
    BACKWARD: (
        "--parallel.accumulate sharded (no rank holds whole gradients between micro-batches), then --compute.recompute full",
        "don't set_requires_gradient_sync(False) while accumulating: every rank then holds whole gradients; then activation"
        " checkpointing",
    ),
    OPTIMIZER: (
        "--optimizer adamw8bit: 2 bytes of moments a number instead of 8; or --parallel.offload optimizer: moments in host memory",
        "an 8-bit optimizer, or fully_shard(..., offload_policy=CPUOffloadPolicy()): moments in host memory",
    ),
    SAVE: (
        "more room between step and card: --compute.recompute full, or a smaller --batch.micro; a save puts one tensor at a time"
        " together",
        "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)), or"
        " torch.distributed.checkpoint.save, which keeps shards; on every rank",
    ),
}  # fmt: skip


@frozen
class Phase:
    name: str
    helps: str  # nothing: the model is not known to be in shards

    @property
    def words(self) -> str:
        return _WORDS[self.name]


def phase_of(end: RankExit) -> Phase | None:
    """None: the forward pass, or nobody knows."""
    trace = end.error.traceback if end.error is not None else ""
    frames = _FRAME.findall(trace)
    ours = _OWN.search(end.tail)
    name = next((name for name in (SAVE, GATHER, OPTIMIZER, BACKWARD) if _is_in(name, frames)), None)
    if name is None:
        return None
    if name == GATHER and not any(_SHARDED.search(file) for file, _ in frames):
        return None  # somebody's own all_gather
    sharded = ours is not None or any(_SHARDED.search(file) for file, _ in frames)
    return Phase(name, _HELPS[name][0 if ours is not None else 1] if sharded else "")


def _is_in(name: str, frames: list[tuple[str, str]]) -> bool:
    files, functions = _FILES.get(name), _FUNCTIONS.get(name)
    return any(
        (files is not None and re.search(files, file)) or (functions is not None and re.fullmatch(functions, function))
        for file, function in frames
    )


ORDER = 25

# torch's out-of-memory message as numbers. Its wording, from torch 2.9 on (CUDA, HIP and XPU): CUDA out of memory.
# Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.00 GiB is free. Process 727 has
# 100.51 GiB memory in use. Including non-PyTorch memory, this process has 38.10 GiB memory in use. 130.00 GiB
# allowed; Of the allocated memory 30.00 GiB is allocated by PyTorch, with 1.00 GiB allocated in private pools (e.g.,
# CUDA Graphs), and 7.00 GiB is reserved by PyTorch but unallocated.


_SIZE = r"([\d.]+) (bytes|[KMGT]iB)"
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@frozen
class Refused:
    """An allocation that did not fit. What the message leaves out is None."""

    needed: int
    total: int | None
    free: int | None
    own: int | None  # of this process, context included
    others: tuple[tuple[int, int], ...]  # pid, bytes
    allowed: int | None  # torch.cuda.set_per_process_memory_fraction
    allocated: int | None
    unused: int | None  # reserved by torch's allocator and not handed out

    @property
    def cached(self) -> int:
        """All that torch's allocator holds."""
        return (self.allocated or 0) + (self.unused or 0)


def read(text: str) -> Refused | None:
    head = re.search(rf"(?:CUDA|HIP|XPU) out of memory\. Tried to allocate {_SIZE}", text)
    if head is None:
        return None
    text = text[head.start() :]
    told = re.findall(rf"Process (\d+) has {_SIZE} memory in use", text)
    others = tuple((int(pid), _bytes(count, unit)) for pid, count, unit in told)
    allocated = _one(text, rf"Of the allocated memory {_SIZE}")
    unused = _one(text, rf"{_SIZE} is reserved by PyTorch but unallocated")
    own = _one(text, rf"this process has {_SIZE} memory in use")
    if own is None and allocated is not None:
        # In a container the driver knows us by the host's pid, and torch takes its own process for another one.
        mine = min(
            (pair for pair in others if pair[1] >= allocated + (unused or 0)), key=lambda pair: pair[1], default=None
        )
        if mine is not None:
            own = mine[1]
            others = tuple(pair for pair in others if pair != mine)
    return Refused(
        _bytes(head[1], head[2]),
        _one(text, rf"total capacity of {_SIZE}"),
        _one(text, rf"of which {_SIZE} is free"),
        own,
        others,
        _one(text, rf"{_SIZE} allowed;"),
        allocated,
        unused,
    )


def _one(text: str, pattern: str) -> int | None:
    found = re.search(pattern, text)
    return _bytes(found[1], found[2]) if found else None


def _bytes(count: str, unit: str) -> int:
    return int(float(count) * _UNITS[unit])


_EXPANDABLE = "PYTORCH_ALLOC_CONF=expandable_segments:True (before torch 2.10: PYTORCH_CUDA_ALLOC_CONF)"
_NO_NUMBERS = (
    r"(?:CUDA|HIP) error: out of memory|(?:CUBLAS|CUDNN|HIPBLAS|CUFFT)_STATUS_ALLOC_FAILED|Cuda failure(?: \d+)? 'out"
    r" of memory'"
)
_SLACK = 2**30  # contexts and what the driver keeps for itself: not a holder worth naming
_PIECES = 2**29  # less than this in torch's cache is no fragmentation, but a card that is full to the brim
_SMALLER = (
    "a chunked or fused loss, so that the logits of all tokens never exist at once (liger-kernel's fused linear"
    " cross-entropy)",
    "activation checkpointing (gradient_checkpointing_enable(), torch.utils.checkpoint)",
    "half the micro-batch with twice the accumulation steps: the global batch and the result stay the same",
    "an 8-bit optimizer (bitsandbytes AdamW8bit): 2 bytes of state per parameter instead of 8",
    "shard parameters, gradients and optimizer over the ranks (FSDP: torch.distributed.fsdp.fully_shard)",
    "last, a shorter sequence: it changes what is learned",
)
# What the record must show for an item of _SMALLER to be advice for this program: a pattern of its last words or of its
# traceback's files and functions. Without an entry it holds for all.
_LANGUAGE_MODEL = r"(?i)logits|cross_entropy|lm_head|log_softmax|nll_loss|/transformers/|stoker/training/"
_LAYERS = (
    r"torch/nn/modules/|torch/autograd/|_engine_run_backward|torch/utils/checkpoint|/transformers/|stoker/training/"
)
_OPTIMIZER = r"torch/optim/|bitsandbytes/optim/|stoker/training/"
_MAKE_ROOM = (
    "stoker clean   # shows what your own dead runs still hold; --yes frees it; other processes are not touched",
    "stoker run --gpus any:N --min-free-memory SIZE --wait 10m   # cards with room, or wait for them",
    "held from outside this container: ask who shares the machine, or the provider",
)
family = Family(__name__, EXPANDABLE=_EXPANDABLE, SMALLER=_SMALLER, MAKE_ROOM=_MAKE_ROOM)


class _Card:
    """The numbers of one refusal, from the message and from what the agent saw on the card."""

    def __init__(self, case: Case, refused: Refused | None) -> None:
        around = case.end.around
        mine = {end.pid for end in case.evidence.ends if end.host == case.end.host}
        self.holders: list[dict[str, Any]] = [
            one for one in around.holders if not one.get("ours") and one.get("pid") not in mine
        ]
        ours = [one for one in around.holders if one.get("ours") or one.get("pid") in mine]
        self.refused = refused
        self.total = (refused.total if refused else None) or around.gpu_total
        known = {one.get("pid") for one in ours} | mine
        # The agent's list is better than the message's: it has names.
        self.strangers = (
            [] if self.holders or not refused else [pair for pair in refused.others if pair[0] not in known]
        )
        self.foreign = sum(one.get("memory") or 0 for one in self.holders) or sum(size for _, size in self.strangers)
        shared = any(
            end.label == case.end.label and end.host == case.end.host and end.rank != case.end.rank
            for end in case.evidence.ends
        )
        if refused and not self.foreign and not shared and None not in (refused.total, refused.free):
            # Others that neither we nor torch can see: what nobody here uses. With --share-gpus it may be a rank's.
            siblings = sum(one.get("memory") or 0 for one in ours if one.get("pid") != case.end.pid) + sum(
                size for pid, size in refused.others if pid in known
            )
            rest = (refused.total or 0) - (refused.free or 0) - (refused.own or refused.cached + _SLACK) - siblings
            self.foreign = max(0, rest) if rest > _SLACK else 0

    @property
    def foreign_decides(self) -> bool:
        """Without the others it would have fitted; a desktop's few MiB decide nothing."""
        if self.foreign < max(_SLACK, (self.total or 0) // 20):
            return False
        refused = self.refused
        if refused is None:
            return self.total is not None and self.foreign * 2 >= self.total
        if refused.allowed is not None and refused.cached + refused.needed > refused.allowed:
            return False
        return refused.needed <= (refused.free or 0) + self.foreign and (
            refused.own or refused.cached
        ) + refused.needed <= (self.total or 0)

    def who_holds(self) -> list[str]:
        lines = []
        for one in self.holders:
            memory = format_bytes(one["memory"]) if one.get("memory") else "an unknown amount"
            if not one.get("command"):
                lines.append(f"pid {one.get('pid')} holds {memory}, held from outside this container")
                continue
            run = f", run {one['run']}" if one.get("run") else ""
            user = f", user {one['user']}" if one.get("user") else ""
            lines.append(f"pid {one.get('pid')} ({one['command']}{user}{run}) holds {memory}")
        lines += [f"pid {pid} holds {format_bytes(size)}" for pid, size in self.strangers]
        if not lines and self.foreign:
            unseen = "processes that can't be seen from here, outside this container"
            lines.append(f"{format_bytes(self.foreign)} are held by {unseen}")
        return lines

    def sentence(self) -> str:
        refused = self.refused
        if refused is None:
            return "an allocation failed"
        parts = [f"{format_bytes(refused.needed)} needed"]
        if refused.free is not None:
            parts.append(
                f"{format_bytes(refused.free)}{f' of {format_bytes(refused.total)}' if refused.total else ''} free"
            )
        if refused.unused is not None:
            parts.append(f"{format_bytes(refused.unused)} reserved and unused")
        return ", ".join(parts)


def _look(case: Case) -> tuple[_Card, tuple[str, ...]] | None:
    refused = read(said(case))
    bare = None if refused else find(case, _NO_NUMBERS)
    if refused is None and bare is None:
        return None
    card = _Card(case, refused)
    said_so = line_of(bare) if bare else next(line for line in said(case).splitlines() if "out of memory" in line)
    own = (f"this process held {format_bytes(refused.own)}",) if refused and refused.own else ()
    at = (f"at {place(case.end)}",) if case.end.error else ()
    return card, (said_so.partition(" If reserved but unallocated")[0], *at, *own, *card.who_holds())


@family.cause("""
oom.gpu-foreign, again: Other processes hold the GPU's memory.
  seen: torch.OutOfMemoryError (or CUDA error 2, CUBLAS_STATUS_ALLOC_FAILED), and processes that are not this run's
      hold so much of the card that what was needed would have fitted without them
  unless: others hold less than 1 GiB and 5 % of the card, or it would not have fitted on an empty card either:
      oom.gpu
  fix: {MAKE_ROOM}
""")
def foreign(case: Case) -> CauseMatch | None:
    looked = _look(case)
    if looked is None or not looked[0].foreign_decides:
        return None
    card, evidence = looked
    mine = tuple(
        f"stoker stop {shlex.quote(str(one['run']))}   # if it is yours and not needed"
        for one in card.holders
        if one.get("run")
    )
    holders = card.who_holds()
    more = f" and {len(holders) - 2} more" if len(holders) > 2 else ""
    who = f"{case.who}: the GPU's memory is taken by others: {card.sentence()}; {'; '.join(holders[:2])}{more}"
    return CauseMatch(who, evidence, (*mine, *_MAKE_ROOM))


@family.cause("""
oom.gpu-fragmentation: The GPU had the memory, but in pieces too small: torch's cache is fragmented.
  seen: torch.OutOfMemoryError, and torch's allocator has reserved at least as much as was needed without handing it
      out
  unless: less is reserved and unused than was needed, or less than 512 MiB: oom.gpu
  fix: {EXPANDABLE}   # stoker run --env NAME=VALUE sets it
  fix: shapes that vary from step to step fragment: pad or bucket the sequences, or pack them to one length
  fix: evaluation and saving between training steps: the same batch shape, or torch.cuda.empty_cache() once after them
""")
def fragmentation(case: Case) -> CauseMatch | None:
    looked = _look(case)
    refused = looked[0].refused if looked else None
    if looked is None or refused is None or refused.unused is None or refused.unused < max(refused.needed, _PIECES):
        return None
    return CauseMatch(f"{case.who}: GPU memory is fragmented: {looked[0].sentence()}", looked[1])


@family.cause("""
oom.gpu: The model, the batch or the optimizer is too big for the GPU.
  seen: torch.OutOfMemoryError, CUDA error 2 (out of memory), CUBLAS_STATUS_ALLOC_FAILED, and neither others nor
      fragments account for it; of `stoker train` with a model that was loaded, which term of its memory plan was
      underestimated; the phase that the traceback shows (gather, backward, optimizer, save), and what helps there
      where the model is in shards (FSDP)
  unless: others hold the card: oom.gpu-foreign; as much as needed is reserved and unused: oom.gpu-fragmentation
  fix: {SMALLER}
""")
def too_big(case: Case) -> CauseMatch | None:
    looked = _look(case)
    if looked is None:
        return None
    card, evidence = looked
    refused = card.refused
    planned = _planned(case)
    evidence = (*evidence, *planned)
    phase = phase_of(case.end)
    when = f"{case.who}: out of GPU memory{f' {phase.words}' if phase else ''}"
    when += at(case) or (f"; last seen at {last_seen(case)}" if last_seen(case) else "")
    helps = (phase.helps, *_smaller(case)) if phase and phase.helps else _smaller(case)
    if refused is None:
        return CauseMatch(when, evidence, helps)
    if refused.allowed is not None and refused.cached + refused.needed > refused.allowed:
        limit = f"the script allows itself {format_bytes(refused.allowed)} only (torch.cuda.set_per_process_memory_fraction)"
        summary = f"{when}: {card.sentence()}; {limit}"
        return CauseMatch(summary, evidence, (f"raise that limit: {limit}", *helps))
    if refused.free is not None and refused.free > refused.needed + _SLACK:
        limit = "a limit on address space (ulimit -v must say unlimited), or a slice or quota of the card"
        odd = f"the driver refused although there is room: {limit}"
        return CauseMatch(f"{when}: {card.sentence()}", (*evidence, odd), (odd, *helps))
    unused = refused.unused or 0
    enough = unused >= _PIECES and (refused.free or 0) + unused >= refused.needed
    pieces = (f"{_EXPANDABLE}: free and unused together would have been enough",) if enough else ()
    short = re.search(r"underestimated: [^;]*", planned[0]) if planned else None
    against = f"; the memory plan {short[0].replace(':', '', 1)}" if short else ""
    return CauseMatch(f"{when}: {card.sentence()}{against}", evidence, (*pieces, *helps))


def _smaller(case: Case) -> tuple[str, ...]:
    """Return the advice of _SMALLER that fits what is on record of this program."""
    error = case.end.error
    text = f"{error.traceback if error else ''}\n{case.words}"
    language, layers, optimizer = (bool(re.search(one, text)) for one in (_LANGUAGE_MODEL, _LAYERS, _OPTIMIZER))
    is_sharded = _SHARDED.search(text) is not None
    trains = language or layers or optimizer or case.end.steps > 0
    applies = (
        language,
        layers,
        trains,
        optimizer or case.end.steps > 0,
        case.evidence.world_size > 1 and not is_sharded,
        language,
    )
    advice = tuple(line for line, fits in zip(_SMALLER, applies, strict=True) if fits)
    return advice or (f"allocate less at once{at(case)}, or use a GPU with more memory",)


def _planned(case: Case) -> tuple[str, ...]:
    """What `stoker train` printed of its memory plan when it ran out: which term was larger than planned."""
    lines = re.findall(r"ran out of GPU memory at [^\n]{0,400}", case.end.tail)
    return (lines[-1],) if lines else ()
