"""Steps whose loss is made of tokens' log-probabilities: the stages reward and dpo, and the model they compare with."""

from __future__ import annotations

import math
from functools import cache

from stoker.contract.frozen import replace
from stoker.training.fit.block import HALF, PROGRAMS, WIDE, Block, Forward, Layer, Rows
from stoker.training.fit.described import Described, Learned
from stoker.training.fit.memory import (
    ACTIVATIONS,
    ADAPTERS,
    GATHERED,
    GRADIENTS,
    LOSS,
    REFERENCE,
    WEIGHTS,
    WORK,
    Held,
    Memory,
    added,
    rounded,
)  # fmt: skip
from stoker.training.fit.terms import (
    BACKWARD,
    FORWARD,
    REWARD,
    Job,
    StageNeeds,
    Step,
    chunk_rows,
    flash,
    offsets,
    rotary_tables,
)  # fmt: skip
from stoker.training.model.config import OFF, ModelConfig, tensors
from stoker.training.parallel.config import RECOMPUTED

COMPARED = "log-probabilities of the reference"  # a phase
# Bytes of a logit at the highest point of each pass (model/loss.py): fp32 with a second tensor beside it, or the 16-bit one
# it was made of; where logits are capped, two beside it.
_FORWARD_LOGIT, _BACKWARD_LOGIT, _CAPPED_LOGIT = 8, 6, 12


def for_stage(d: Described, needs: StageNeeds) -> Described:
    """With what stage reward adds to a decoder, and without what it leaves out."""
    if needs.stage != REWARD:
        return d
    sizes = (d.config.dim, 1) if needs.likelihood else (d.config.dim,)
    own = tuple(Learned(size, False, False, ((size,),)) for size in sizes)
    held = {**d.held, WEIGHTS: d.held[WEIGHTS] + sum(rounded(WIDE * size) for size in sizes)}
    unread = not needs.likelihood and not d.config.tied and d.adapter.method == OFF  # the head, which stays in fp32
    learned = d.learned[:-1] if unread else d.learned
    return replace(d, learned=(*learned, *own), held=held, head_learns=d.head_learns and not unread)


def reference_bytes(d: Described, needs: StageNeeds, context: int) -> int:
    """Of the model that the run began with: 16-bit weights of its own, or what learns beside frozen ones as it was."""
    c = d.config
    if d.adapter.method == OFF:
        return stored_bytes(c, HALF) + rotary_tables(c, context)
    whole = [one for one in d.learned if not (one.matrix and one.inside)]  # adapter.also_train
    copies = sum(rounded(WIDE * one.elements) for one in whole)
    if needs.loaded:
        copies += d.held[ADAPTERS]
    return copies


def stored_bytes(c: ModelConfig, width: int) -> int:
    """Of a whole model with `width` bytes a number."""
    return sum(rounded(width * sum(map(math.prod, sizes))) for _, sizes in tensors(c))


def beginning(block: Block, loaded: bool) -> Block:
    """The block as the reference computes it: nothing learns, weights have 16 bits or 4."""

    def layer(one: Layer | None) -> Layer | None:
        if one is None:
            return None
        adapted = (one.adapted, one.rank) if loaded else ((), 0)
        return Layer(one.rows, one.inputs, min(one.stored, HALF), bias=one.bias, adapted=adapted[0], rank=adapted[1])

    qkv, out = layer(block.qkv), layer(block.out)
    assert qkv is not None and out is not None
    return replace(
        block, qkv=qkv, out=out, gate_up=layer(block.gate_up), down=layer(block.down), norm_learns=False,
        expert_copies=0, expert_gradients=0,
    )  # fmt: skip


@cache
def unkept(block: Block, rows: Rows, whole: bool) -> dict[str, int]:
    """A block's highest point in a pass without gradients."""
    m = Memory()
    if whole:
        m.take(ACTIVATIONS, HALF * rows.tokens * block.width)
    Forward(m, block, rows).forward(whole=whole, saves=False)
    return m.at_peak


class LogprobStep(Step):
    """`_read`: tokens whose log-probabilities are asked for; `_gathered`: their rows are a tensor of their own."""

    _floats = False  # what the head reads, in fp32 too

    def __init__(self, d: Described, job: Job) -> None:
        super().__init__(for_stage(d, job.needs), job)
        self._read, self._gathered = self._asked()

    def _asked(self) -> tuple[int, bool]:
        return self._job.tokens - self._job.micro, self._job.micro > 1

    def _compare(self, now: dict[str, int]) -> None:
        """A pass of the reference, without gradients. `now`: what is there, with the batch."""
        d, job = self._d, self._job
        rows, loaded = Rows(job.tokens, offsets(job)), job.needs.loaded
        frozen = d.adapter.method != OFF
        stored = HALF if d.embedding == WIDE and not frozen else d.embedding
        wide = rounded(WIDE * job.tokens * d.config.dim) if stored == WIDE else 0
        highest = {WORK: wide + self._stream}
        kinds = {
            (d.kinds[at], flash(d, job, at), at == 0, self._kinds[at] == RECOMPUTED) for at in range(d.config.layers)
        }
        for kind, by_offsets, first, again in kinds:
            block = replace(beginning(d.blocks[kind], loaded), flash=by_offsets)
            came = {WORK: self._stream * (0 if first else 2)}
            inside = added(unkept(block, rows, first or again), came)
            highest = max(highest, inside, key=lambda terms: sum(terms.values()))
        self._reach(COMPARED, added(now, highest))
        m = Memory(now)
        entering = [m.take(WORK, self._stream) for _ in range(3)]
        normed = m.take(WORK, self._stream)
        m.take(WORK, WIDE * job.tokens)
        m.give(*entering)
        self._logprobs(m, normed, HALF if not frozen else d.head, keeps=False)
        self._reach(COMPARED, m.at_peak)

    def _logprobs(self, m: Memory, normed: Held, head: int, *, keeps: bool) -> list[Held]:
        """The forward pass of model/loss.py's log-probabilities; what stays of it."""
        c = self._d.config
        flat = normed
        if self._gathered:
            flat = m.take(ACTIVATIONS, HALF * self._read * c.dim)
            if not self._floats:
                m.give(normed)
        copied = m.take(LOSS, HALF * c.vocab_size * c.dim if head == WIDE else 0)
        found = [m.take(LOSS, WIDE * self._read) for _ in range(3)]
        logits = chunk_rows(self._read, c.vocab_size, WIDE) * c.vocab_size
        m.give(m.take(LOSS, logits * (_CAPPED_LOGIT if c.final_cap else _FORWARD_LOGIT)))
        m.give(copied)
        if self._gathered and self._floats:
            m.give(normed)
        return [flat, *found] if keeps else []

    def _loss(self, now: dict[str, int]) -> dict[str, int]:
        d, c, n, m = self._d, self._d.config, self._job.tokens, Memory(now)
        again = self._kinds[-1] == RECOMPUTED
        entering = [m.take(WORK, self._stream) for _ in range(2 if again else 1)]
        weight = m.take(GATHERED, self._sharded.loss if self._sharded is not None else 0)
        saved = [m.take(ACTIVATIONS, self._stream), m.take(ACTIVATIONS, WIDE * n)]
        normed = m.take(ACTIVATIONS, self._stream)
        m.give(*entering)
        wide = m.take(ACTIVATIONS, WIDE * n * c.dim) if self._floats else None
        kept = self._logprobs(m, normed, d.head, keeps=True) if self._read else []
        if not self._read:
            m.give(normed)
        self._reach(FORWARD, m.at_peak)
        m = Memory(m.now)
        gradient, dw = self._from_logprobs(m, kept) if self._read else (None, None)
        if wide is not None:
            outer = m.take(WORK, wide[1])
            m.give(wide)
            narrow = m.take(WORK, self._stream)
            m.give(outer)
            if gradient is not None:
                m.give(narrow)  # added to it
            else:
                gradient = narrow
        found = [m.take(WORK, self._stream) for _ in range(2)]
        shares = m.take(WORK, WIDE * min(PROGRAMS, n) * c.dim)
        self._reach(BACKWARD, m.at_peak)
        m.give(*saved, gradient, *found, shares, weight)  # the gradient of the stream is part of each block's own pass
        if dw is not None and not c.tied:  # a tied one waits for the embedding's
            m.give(dw)
            if self._steals:
                m.take(GRADIENTS, dw[1])
        return m.now

    def _from_logprobs(self, m: Memory, kept: list[Held]) -> tuple[Held, Held | None]:
        """Backward through them: (the gradient of what the head read, the head's own)."""
        d, c = self._d, self._d.config
        copied = m.take(LOSS, HALF * c.vocab_size * c.dim if d.head == WIDE else 0)
        dx = m.take(LOSS, HALF * self._read * c.dim)
        dw = m.take(LOSS, WIDE * c.vocab_size * c.dim) if d.head_learns else None
        scaled = m.take(LOSS, WIDE * self._read)
        logits = chunk_rows(self._read, c.vocab_size, WIDE) * c.vocab_size
        m.give(m.take(LOSS, logits * (_CAPPED_LOGIT if c.final_cap else _BACKWARD_LOGIT)))
        m.give(copied, scaled, *kept)
        gradient = m.take(WORK, self._stream)
        m.give(dx)
        return gradient, dw


class DpoStep(LogprobStep):
    def _base(self) -> dict[str, int]:
        copy = self._job.part(reference_bytes(self._d, self._job.needs, self._job.context))
        return added(super()._base(), {REFERENCE: copy})

    def _forward(self, now: dict[str, int]) -> dict[str, int]:
        self._compare(now)
        return super()._forward(now)


class RewardStep(LogprobStep):
    _floats = True

    def _asked(self) -> tuple[int, bool]:
        return super()._asked() if self._job.needs.likelihood else (0, False)

    def _joined(self) -> bool:
        return super()._joined() and self._job.needs.likelihood
