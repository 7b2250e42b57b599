"""What one rank holds in each phase of a step, in bytes by what it is for: the plan's memory. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from itertools import groupby, zip_longest

from stoker.contract.frozen import frozen, replace
from stoker.training.fit.backward import Walk
from stoker.training.fit.block import HALF, PROGRAMS, WIDE, Block, Rows
from stoker.training.fit.cards import BF16_SINCE
from stoker.training.fit.described import KIND_MUON, Described
from stoker.training.fit.memory import (
    ACTIVATIONS,
    ADAPTERS,
    BUFFERS,
    GATHERED,
    GRADIENTS,
    LOSS,
    OPTIMIZER,
    WEIGHTS,
    WORK,
    Memory,
    added,
    rounded,
)  # fmt: skip
from stoker.training.fit.sharded import as_computed, gathered, kept_copies
from stoker.training.model.config import ModelConfig
from stoker.training.optim.config import CHUNK, MUON_BYTES
from stoker.training.parallel.config import EVERYTHING, HOST_LEAST, MLP_AGAIN, NOTHING, RECOMPUTED, block_kinds
from stoker.training.parallel.config import host_bytes as pinned_bytes

CHUNK_BYTES = 1 << 29  # of logits (model/loss.py)
CUBLAS = {9: 32 << 20, 10: 32 << 20}  # bytes of cuBLAS's workspace by compute capability
CUBLAS_ELSE = 8519680
HANDLES = 2  # of cuBLAS: the thread of the forward pass, and that of the backward pass
FORWARD, BACKWARD, STEP = "forward and loss", "backward", "optimizer step"
SFT, REWARD, DPO, GRPO = "sft", "reward", "dpo", "grpo"


@frozen
class StageNeeds:
    """What a stage holds and computes besides a step on rows."""

    stage: str = SFT  # pretrain and midtrain are the same step
    likelihood: bool = True  # reward.likelihood
    reference: bool = True  # GRPO's, where grpo.kl is above 0; DPO always has one
    loaded: bool = False  # adapters begin with a folder: the reference keeps them as they were
    rows: int = 64  # answers that are written at once (generate.rows)
    bits: int = 0  # of a weight meanwhile, 16 or 4 (generate.bits); 0: the plan decides
    new_tokens: int = 128
    length: int = 0  # tokens of the longest prompt and its answer; 0: as many as the context
    answers: int = 256  # of a step, all ranks together
    updates: int = 1
    reward_model: str = ""  # its folder (grpo.reward_model)
    scorer: ModelConfig | None = None  # that model's shape
    scorer_likelihood: bool = True


def asked_bits(told: str) -> int:
    """Of generate.bits."""
    return 0 if told == "auto" else int(told)


@frozen
class Job:
    micro: int
    context: int
    optimizer: str = "adamw"
    packed: bool = False
    documents: int = 1  # in a packed row
    recomputed: int = 0  # so many blocks keep their inputs alone (parallel/config.py: block_kinds)
    world: int = 1
    accumulates: bool = True  # gradients of a micro-batch before are there already
    capability: int = 9  # compute capability, its first number
    on_host: bool = False  # an embedding that does not learn lies in host memory
    inputs_on_host: bool = False  # and so does what blocks keep, but for the last one's
    needs: StageNeeds = StageNeeds()
    shards: int = 1  # that each tensor is cut into (parallel.strategy fsdp)
    whole: bool = False  # shards: gradients of all weights wait for the last micro-batch (parallel.accumulate)
    offload: str = NOTHING  # shards: what lives in host memory (parallel.offload)
    mlp: int = 0  # so many blocks more keep all but the MLP's first product

    def part(self, size: int) -> int:
        """A rank's, of what is cut into shards."""
        return -(-size // self.shards)

    @property
    def tokens(self) -> int:
        return self.micro * self.context

    def kinds(self, layers: int) -> tuple[str, ...]:
        return block_kinds(layers, self.recomputed, self.inputs_on_host, self.mlp)


@frozen
class Planned:
    """At its highest."""

    terms: dict[str, int]
    phase: str
    phases: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.terms.values())


@frozen
class _Passes:
    """Of one block: bytes by term at the highest point of each pass, over what stays of the blocks before it."""

    forward: dict[str, int]
    stays: dict[str, int]  # from its forward to its backward pass
    backward: dict[str, int]
    grows: dict[str, int]  # gradients that stay
    saved: tuple[int, ...]  # bytes of each storage that a backward pass reads, of those that are worth a copy


@frozen
class _Run:
    """Blocks that follow each other and are alike."""

    passes: _Passes
    count: int
    again: bool
    leaves: dict[str, int]  # of each, on its way to the host while the next block computes, or two
    comes: dict[str, int]  # of each, on its way back while the next block goes backward

    @property
    def places(self) -> tuple[int, ...]:
        """Those of them at which memory may be highest."""
        return tuple(sorted({0, min(1, self.count - 1), self.count - 1}))


@cache
def _passes(block: Block, rows: Rows, first: bool, kind: str, steals: bool) -> _Passes:
    """`kind`: what it keeps (parallel/config.py: block_kinds)."""
    again = kind == RECOMPUTED  # its forward pass is computed once more in the backward pass
    stream = HALF * rows.tokens * block.width
    m = Memory()
    walk = Walk(m, block, rows, steals=steals, lean=kind == MLP_AGAIN)
    whole = first or again  # a recomputed block is given the sum, which is all that it keeps
    if whole:
        m.take(ACTIVATIONS, stream)
    saved, result = walk.forward(whole=whole, saves=not again)
    forward = m.at_peak
    m.give(result)
    if again:
        m.give(*saved.values())
    stays = dict(m.now)
    sizes = ([stream] if whole else []) + ([] if again else [held[1] for held in saved.values()])
    moved = tuple(size for size in sizes if again or size >= HOST_LEAST)
    gradient = m.take(WORK, stream)
    m.peak, m.at_peak = m.total, dict(m.now)
    if again:
        saved = walk.again()
    m.give(walk.backward(saved, gradient))
    return _Passes(forward, stays, m.at_peak, {GRADIENTS: m.now.get(GRADIENTS, 0)}, moved)


def reserved(total: int) -> int:
    """What must be free for so much in tensors: the allocator maps pages of 20 MiB, and leaves gaps between tensors. (With
    long contexts up to 193 MiB were in gaps when the next tensor found no place: benchmarks/small_cards.py.)"""
    return total + total // 100 + min((64 << 20) + total // 64, 160 << 20)


def predict(d: Described, job: Job) -> Planned:
    """`max_memory_allocated` of a rank."""
    return Step(d, job).planned()


class Step:
    """The phases of a step, gone through with one block's passes for all blocks that are like it."""

    def __init__(self, d: Described, job: Job) -> None:
        self._sharded = gathered(d) if job.shards > 1 else None
        self._d, self._job = as_computed(d) if self._sharded else d, job
        self._steals = not job.accumulates and job.world == 1
        self._stream = rounded(HALF * job.tokens * d.config.dim)
        self._kinds = job.kinds(d.config.layers)
        self._runs = list(self._like())
        self._highest: dict[str, dict[str, int]] = {}

    def _like(self) -> Iterator[_Run]:
        rows = Rows(self._job.tokens, offsets(self._job))
        of = [self._of(at) for at in range(self._d.config.layers)]
        for (block, by_offsets, first, kind, moves), run in groupby(of):
            one = _passes(replace(self._d.blocks[block], flash=by_offsets), rows, first, kind, self._steals)
            again = kind == RECOMPUTED
            moved = {ACTIVATIONS: sum(map(rounded, one.saved))} if moves else {}
            one = replace(one, stays=added(one.stays, moved, -1))
            yield _Run(one, sum(1 for _ in run), again, {} if again else moved, moved)

    def _of(self, at: int) -> tuple[int, bool, bool, str, bool]:
        """What blocks differ in; those that follow each other and are alike are gone through once."""
        d, job = self._d, self._job
        moves = job.inputs_on_host and at < d.config.layers - 1
        return d.kinds[at], flash(d, job, at), at == 0, self._kinds[at], moves

    def planned(self) -> Planned:
        base = self._base()
        now = self._forward(added(base, self._entered()))
        now = self._loss(now)
        for at, run in reversed(list(enumerate(self._runs))):
            one, count = run.passes, run.count
            for place in reversed(run.places):
                inside = added(added(now, one.stays, place - count), one.grows, count - 1 - place)
                self._reach(BACKWARD, added(added(inside, one.backward), self._coming(at, place)))
            now = added(added(now, one.stays, -count), one.grows, count)
        self._embedding(now)
        held = base if self._job.offload == EVERYTHING else {**base, GRADIENTS: self._job.part(self._d.gradients)}
        self._reach(STEP, added(held, {WORK: _update(self._d, self._job)}))
        totals = {phase: sum(terms.values()) for phase, terms in self._highest.items()}
        phase = max(totals, key=lambda name: totals[name])
        return Planned({term: size for term, size in self._highest[phase].items() if size}, phase, totals)

    def _base(self) -> dict[str, int]:
        return base_of(self._d, self._job)

    def _entered(self) -> dict[str, int]:
        return _entered(self._d, self._job)

    def _joined(self) -> bool:
        """Whether the embedding has a gradient as the head, too."""
        return self._d.config.tied

    def moved_bytes(self) -> int:
        """What a micro-batch sends to host memory, and fetches again."""
        return sum(run.count * sum(run.comes.values()) for run in self._runs)

    def host_bytes(self) -> int:
        """What a rank takes of host memory: the embedding, and what blocks keep: inputs of recomputed ones; of others their first
        storages, their second ones, ..."""
        c = self._d.config
        embedding = HALF * c.vocab_size * c.dim if self._job.on_host and self._d.can_be_on_host else 0
        moved = [(run.again, run.passes.saved, run.count) for run in self._runs if run.comes]
        inputs = sum(count for again, _, count in moved if again)
        others = [(saved, count) for again, saved, count in moved if not again]
        columns = zip_longest(*(saved for saved, _ in others), fillvalue=0)
        pieces = sum(count for _, count in others)
        kept = pinned_bytes(self._stream, inputs) + sum(pinned_bytes(max(column), pieces) for column in columns)
        return embedding + kept + self._offloaded()

    def _offloaded(self) -> int:
        d, job = self._d, self._job
        moments = job.part(d.optimizer(job.optimizer)) if job.offload != NOTHING else 0
        if job.offload != EVERYTHING:
            return moments
        return moments + job.part(sum(d.held.values()) - kept_copies(d) + d.gradients)

    def _reach(self, phase: str, now: dict[str, int]) -> None:
        if self._sharded is not None and phase != STEP:
            now = added(now, self._sharded.backward() if phase == BACKWARD else self._sharded.forward())
            if (
                self._job.offload == EVERYTHING
            ):  # a unit's shard on its way up, and that of its gradients on its way down
                now = added(now, {GATHERED: self._job.part(max(self._sharded.block, self._sharded.head))})
                if phase == BACKWARD:
                    now = added(now, {GRADIENTS: self._job.part(self._sharded.exchanged)})
        if phase not in self._highest or sum(now.values()) > sum(self._highest[phase].values()):
            self._highest[phase] = now

    def _forward(self, now: dict[str, int]) -> dict[str, int]:
        wide = rounded(WIDE * self._job.tokens * self._d.config.dim) if self._d.embedding == WIDE else 0
        self._reach(FORWARD, added(now, {WORK: wide + self._stream}))
        for at, run in enumerate(self._runs):
            for place in run.places:
                inside = added(now, run.passes.stays, place)
                self._reach(FORWARD, added(added(inside, run.passes.forward), self._entering(at, place)))
            now = added(now, run.passes.stays, run.count)
        return now

    def _before(self, at: int, place: int) -> tuple[_Run | None, _Run | None]:
        """The runs of the block before block `place` of run `at`, and of the one before that."""
        found: list[_Run | None] = [self._runs[at]] * min(place, 2)
        for run in reversed(self._runs[max(at - 2, 0) : at]):
            found += [run] * min(run.count, 2)
        found += [None, None]
        return found[0], found[1]

    def _entering(self, at: int, place: int) -> dict[str, int]:
        """What is there while a block computes: what leaves of the one before or of the one before that, what is to be added to
        the stream, and the stream itself where the block before has not saved it. What comes into the first block stays."""
        one, two = self._before(at, place)
        if one is None:
            return {}
        leaves = one.leaves or (two.leaves if two is not None else {})
        return added(leaves, {WORK: self._stream * (2 if one.again else 1)})

    def _coming(self, at: int, place: int) -> dict[str, int]:
        """What is there while a block goes backward: what the one before keeps, and what the one before that has saved where
        the former is an input alone."""
        one, two = self._before(at, place)
        if one is None:
            return {}
        return added(one.comes, two.leaves if two is not None and one.again and one.comes else {})

    def _loss(self, now: dict[str, int]) -> dict[str, int]:
        """The last norm and the head, forward and backward."""
        d, c, n, m = self._d, self._d.config, self._job.tokens, Memory(now)
        again = self._kinds[-1] == RECOMPUTED
        entering = [m.take(WORK, self._stream) for _ in range(2 if again else 1)]
        weight = m.take(GATHERED, self._sharded.loss if self._sharded is not None else 0)
        saved = [m.take(ACTIVATIONS, self._stream), m.take(ACTIVATIONS, WIDE * n)]
        normed = m.take(WORK, self._stream)
        m.give(*entering)
        copied = m.take(LOSS, HALF * c.vocab_size * c.dim if d.head == WIDE else 0)
        dx = m.take(LOSS, self._stream)
        dw = m.take(LOSS, WIDE * c.vocab_size * c.dim) if d.head_learns else None
        losses = m.take(LOSS, WIDE * n)
        logits = HALF * chunk_rows(n, c.vocab_size) * c.vocab_size
        chunk = [m.take(LOSS, logits) for _ in range(3 if c.final_cap else 1)]
        self._reach(FORWARD, m.at_peak)
        m.give(*chunk, copied, losses, normed)
        m = Memory(m.now)
        found = [m.take(WORK, self._stream) for _ in range(2)]
        shares = m.take(WORK, WIDE * min(PROGRAMS, n) * c.dim)
        self._reach(BACKWARD, m.at_peak)
        m.give(*saved, dx, *found, shares, weight)  # the gradient of the stream is part of each block's own pass
        if dw is not None and not c.tied:  # a tied one waits for the embedding's
            m.give(dw)
            if self._steals:
                m.take(GRADIENTS, dw[1])
        return m.now

    def _embedding(self, now: dict[str, int]) -> None:
        d, c, n, m = self._d, self._d.config, self._job.tokens, Memory(now)
        if d.embedding_learns:
            gradient = m.take(WORK, self._stream)
            if c.embedding_scale != 1.0:
                before, gradient = gradient, m.take(WORK, self._stream)
                m.give(before)
            wide = m.take(WORK, WIDE * n * c.dim)
            m.give(gradient)
            own = [m.take(GRADIENTS, WIDE * c.vocab_size * c.dim)]
            m.give(wide)
            if self._joined():  # added to the head's, into a third
                own.append(m.take(GRADIENTS, WIDE * c.vocab_size * c.dim))
        if self._sharded is not None:
            m.take(GRADIENTS, self._sharded.embedding)
        self._reach(BACKWARD, m.at_peak)


def views(c: ModelConfig) -> int:
    """Kinds of layers, by window and rotary table."""
    return len({(c.window(at), at in c.unrotated) for at in range(c.layers)})


def rotary_tables(c: ModelConfig, context: int) -> int:
    return 2 * views(c) * rounded(WIDE * context * int(c.head_dim * c.rope_share) // 2)


def base_of(d: Described, job: Job) -> dict[str, int]:
    """What is there all the time."""
    c, tables = d.config, rotary_tables(d.config, job.context)
    workspace = HANDLES * CUBLAS.get(job.capability, CUBLAS_ELSE)
    there = job.accumulates or job.world > 1  # DDP's buckets are the gradients, and stay
    held = {term: job.part(size) for term, size in d.held.items()}
    if job.offload == EVERYTHING:
        held = {term: 0 for term in held} | {ADAPTERS: kept_copies(d)}
    elif job.shards > 1:
        held[ADAPTERS] += kept_copies(d) - job.part(kept_copies(d))
    if job.on_host and d.can_be_on_host:
        held[WEIGHTS] -= rounded(HALF * c.vocab_size * c.dim)
    gradients = d.gradients if job.whole and job.accumulates else job.part(d.gradients)
    if job.offload == EVERYTHING and not job.whole:
        gradients = 0
    return {
        **held,
        GRADIENTS: gradients if there else 0,
        OPTIMIZER: job.part(d.optimizer(job.optimizer)) if job.offload == NOTHING else 0,
        BUFFERS: rounded(d.dequantized) + tables + workspace,
    }


def flash(d: Described, job: Job, layer: int) -> bool:
    return job.packed or 0 < d.config.window(layer) < job.context


def offsets(job: Job) -> int:
    """Documents of a packed micro-batch, rounded up as model/attention.py does; windows alone: its rows."""
    if not job.packed:
        return job.micro
    return 1 << (job.micro * job.documents).bit_length()


def _entered(d: Described, job: Job) -> dict[str, int]:
    """Tokens, targets, and where packed rows' angles are looked up."""
    n, c = job.tokens, d.config
    found = 2 * rounded(8 * n)
    if job.packed:
        kinds = len({c.window(at) for at in range(c.layers)})
        found += rounded(4 * n) + rounded(8 * n) + 2 * kinds * rounded(WIDE * n * c.head_dim // 2)
        if job.capability < BF16_SINCE:  # no kernel knows where documents begin: a mask of each row
            found += kinds * rounded(HALF * n * job.context)
    elif any(flash(d, job, at) for at in range(c.layers)):
        found += rounded(4 * n)
    return {ACTIVATIONS: found}


def chunk_rows(tokens: int, vocabulary: int, width: int = HALF) -> int:
    return min(tokens, max(CHUNK_BYTES // (vocabulary * width), 256) // 256 * 256)


def _update(d: Described, job: Job) -> int:
    """What an optimizer step takes for itself. Fused kernels take nothing; Muon's products do."""
    if job.offload != NOTHING:  # what visits: weights, gradients and both moments
        largest = max((one.elements for one in d.learned), default=0)
        return max(CHUNK, job.part(4 * WIDE * largest))
    if job.optimizer != KIND_MUON:
        return 0
    inside = [one for one in d.learned if one.matrix and one.inside]
    gradients = sum(rounded(WIDE * one.elements) for one in inside)
    count: dict[tuple[int, ...], int] = {}
    for one in inside:
        for size in one.shapes:
            count[size] = count.get(size, 0) + 1
    # All gradients once more and what is ahead of them; of the largest group of like matrices an fp32 stack, four in bf16,
    # and their squares. In shards a rank puts a few of them together, in bf16, and sends and receives as much.
    if job.shards > 1:
        count = {size: min(many, max(MUON_BYTES // (WIDE * math.prod(size)), 1)) for size, many in count.items()}
    group = max((many * (12 * math.prod(size) + HALF * min(size) ** 2) for size, many in count.items()), default=0)
    return 2 * job.part(gradients) + group
