"""GRPO: answers are written over a cache of keys and values, by a 16-bit copy of the weights or by their 4-bit codes, then
learned from. Follows generate/ and rl/."""

from __future__ import annotations

import math

from stoker.contract.frozen import replace
from stoker.training.fit.block import HALF, WIDE
from stoker.training.fit.described import Described
from stoker.training.fit.memory import (
    ACTIVATIONS,
    BUFFERS,
    CACHE,
    COPY,
    GRADIENTS,
    GRAPHS,
    REFERENCE,
    SCORER,
    WORK,
    Memory,
    added,
    rounded,
)  # fmt: skip
from stoker.training.fit.pairs import LogprobStep, reference_bytes, stored_bytes
from stoker.training.fit.terms import (
    CUBLAS,
    CUBLAS_ELSE,
    HANDLES,
    Job,
    base_of,
    chunk_rows,
    flash,
    rotary_tables,
    views,
)  # fmt: skip
from stoker.training.generate.config import BLOCK, BUCKET, PREFILL_TOKENS, TURN, kernels_lack
from stoker.training.model.config import ModelConfig, tensors
from stoker.training.model.nf4_size import multipliable
from stoker.training.model.nf4_size import stored_bytes as stored_codes
from stoker.training.serve.request import MOST_ALTERNATIVES

ANSWERS, SCORES = "answers", "scores of the reward model"  # phases
MULTIPLE = 16  # rows that are learned from are filled up to it (rl/update.py)
_LONG = 8  # bytes of an int64
_STREAMS = 2  # besides training's: the step before a capture and the capture have a workspace of cuBLAS each
_INDEXES = 8  # of a token in a prompts' pass: id, place, slot and the like
SPLIT_PROGRAMS = 512  # among which rows' tokens are split (serve/kernel.py)
CHUNK = 1024  # words of the vocabulary that one program of the sampling kernel adds up (generate/kernel.py)


class Writing:
    """The engine of one rank. `rows` answers at once of `length` tokens with their prompts; `codes`: by 4-bit weights where
    they have them; `sharded`: nothing of the model's own can be read in place."""

    def __init__(
        self, d: Described, rows: int, length: int, new_tokens: int, codes: bool = False, sharded: bool = False
    ) -> None:
        self._d, self._c, self._sharded = d, d.config, sharded
        self._rows, self._length = rows, length
        self._prompt = max(length - new_tokens, 1)
        self._plain = bool(kernels_lack(self._c, length))
        self._coded = {name for name, sizes in tensors(d.config) if codes and _by_codes(d, name, sizes[0])}
        self._adapted = [target for target in d.adapted if f"{target.name}.weight" not in self._coded]

    def held(self) -> dict[str, int]:
        """Graphs: the captured step's own memory, and the step before the capture, whose stream keeps its memory."""
        return {COPY: self._copy(), CACHE: self._cache(), GRAPHS: 2 * self._step()}

    def _copy(self) -> int:
        """Of the weights in 16 bits, adapters merged into them; what has 16 bits and no adapter is shared."""
        d, c, found = self._d, self._c, 0
        adapted = {f"{target.name}.weight" for target in self._adapted}
        for name, sizes in tensors(c):
            elements = sum(map(math.prod, sizes))
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                continue  # together, below
            if name in self._coded:
                found += sum(map(stored_codes, map(math.prod, sizes))) if self._sharded else 0
                continue
            if "norm" in name:
                found += rounded(WIDE * elements) if c.norm_offset or c.norm_kind == "layer" else 0
            elif self._sharded or d.stored[name] != HALF or name in adapted:
                found += rounded(HALF * elements)
        if c.qk_norm:
            found += c.layers * rounded(WIDE * (c.heads + c.kv_heads) * c.head_dim)
        return found

    def _cache(self) -> int:
        """Blocks for every row and one more, and one that is nobody's (serve/batch.py); then what a step is told and tells."""
        c, rows, across = self._c, self._rows, -(-self._length // BLOCK)
        slots = (rows * (across + 1) + 1) * BLOCK
        keys = rounded(2 * HALF * c.layers * c.kv_heads * slots * c.head_dim)
        turned = int(c.head_dim * c.rope_share)
        angles = 2 * views(c) * rounded(WIDE * self._length * turned)
        told = rounded(_LONG * rows * (3 + across)) + rounded(WIDE * rows * (2 + TURN)) + rounded(_LONG * rows)
        made, most = rows * TURN, min(MOST_ALTERNATIVES, c.vocab_size)
        sizes = (_LONG, _LONG * made, WIDE * made, WIDE * made * most, _LONG * made * most)
        return keys + angles + told + sum(map(rounded, sizes))

    def prefill(self) -> int:
        """The prompts' pass: so many tokens at once."""
        tokens = min(self._rows * self._prompt, PREFILL_TOKENS)
        m = Memory()
        m.take(WORK, _INDEXES * _LONG * tokens)
        together = (
            min(self._prompt, tokens) if self._plain else tokens
        )  # without kernels each prompt's attention is alone
        self._pass(m, tokens, -(-tokens // self._prompt), self._gathered(together))
        return m.peak

    def _gathered(self, tokens: int) -> int:
        """Queries, keys and values of prompts that attend together, and their sum."""
        c = self._c
        return 2 * rounded(HALF * tokens * c.heads * c.head_dim) + 2 * rounded(HALF * tokens * c.kv_heads * c.head_dim)

    def _step(self) -> int:
        m, c, rows = Memory(), self._c, self._rows
        split = WIDE * SPLIT_PROGRAMS * c.heads // c.kv_heads * (c.head_dim + 2)
        if self._plain:  # a layer's keys and values are read by an index
            slots = -(-self._length // BUCKET) * BUCKET
            split = rows * slots * (2 * HALF * c.kv_heads * c.head_dim + 3 * _LONG + HALF * views(c))
        self._pass(m, rows, rows, split)
        return m.peak

    def _pass(self, m: Memory, tokens: int, asked: int, attention: int) -> None:
        """Through the blocks, the head and the sampling (generate/cached.py, serve/paged.py). Locals live to the next layer.
        `attention`: bytes beside its result."""
        c, stream = self._c, HALF * tokens * self._c.dim
        queries = HALF * tokens * c.heads * c.head_dim
        both = queries + HALF * tokens * c.kv_heads * c.head_dim
        qkv = queries + 2 * HALF * tokens * c.kv_heads * c.head_dim
        turned = int(c.head_dim * c.rope_share)
        m.take(WORK, 2 * _LONG * tokens)
        m.take(WORK, 2 * views(c) * WIDE * tokens * turned)
        x, delta = m.take(WORK, stream), m.take(WORK, stream)
        rotated = both if self._plain else queries  # plain torch turns queries and keys as one tensor
        before = [m.take(WORK, size) for size in (stream, qkv, rotated)]  # of the layer before: normed, qkv, q
        m.give(before[0])
        added_up = m.take(WORK, stream)
        normed = self._normed(m, tokens)
        m.give(x)
        m.give(before[1])
        m.take(WORK, qkv)
        m.give(before[2])
        m.take(WORK, rotated)
        if self._plain:  # turned in fp32
            parts = [m.take(WORK, 2 * both) for _ in range(4)]
            m.give(*parts)
        attended = m.take(WORK, queries)
        m.give(m.take(WORK, attention))
        m.give(delta)
        delta = m.take(WORK, stream)
        m.give(attended)
        x, added_up = added_up, m.take(WORK, stream)
        m.give(normed)
        normed = self._normed(m, tokens)
        m.give(x)
        gates = 2 if c.gated else 1
        gate_up = m.take(WORK, HALF * tokens * c.ff * gates)
        if self._plain or (c.activation, c.gated) != ("silu", True):
            pieces = [m.take(WORK, WIDE * tokens * c.ff) for _ in range(3)]
            m.give(*pieces[1:])
            inner = m.take(WORK, HALF * tokens * c.ff)
            m.give(pieces[0])
        else:
            inner = m.take(WORK, HALF * tokens * c.ff)
        m.give(gate_up)
        m.take(WORK, stream)
        m.give(inner)
        logits = rounded(HALF * asked * c.vocab_size)
        m.give(m.take(WORK, logits * (3 if c.final_cap else 1)))
        m.give(m.take(WORK, logits + self._sampled(asked)))

    def _normed(self, m: Memory, tokens: int) -> tuple[str, int]:
        wide = WIDE * tokens * self._c.dim
        if self._plain:
            m.give(m.take(WORK, 3 * wide))
        else:
            m.give(m.take(WORK, WIDE * tokens))
        return m.take(WORK, wide // 2)

    def _sampled(self, rows: int) -> int:
        """Beside the logits: probabilities in fp32 and their sums, or what the kernel adds up by chunks."""
        words = self._c.vocab_size
        if self._plain:
            return 3 * rounded(WIDE * rows * words)
        return rounded(2 * WIDE * rows * -(-words // CHUNK))

    def merging(self) -> int:
        """An adapter's product with its weight, in fp32: three as large as the largest part."""
        sizes = ((end - begin) * target.inputs for target in self._adapted for begin, end in target.parts())
        return 3 * rounded(WIDE * max(sizes, default=0))


def _by_codes(d: Described, name: str, size: tuple[int, ...]) -> bool:
    """Whether answers are written by this weight's codes (model/linear.py)."""
    return d.stored[name] == 0 and multipliable(size[-1])


class GrpoStep(LogprobStep):
    """Writing answers, scoring them, comparing with the reference, learning: the highest of these phases counts."""

    def __init__(self, d: Described, job: Job) -> None:
        needs = job.needs
        self._whole = job
        length = min(needs.length or job.context, job.context)
        self._length, self._new = length, min(needs.new_tokens, length - 1)
        self._answers = max(-(-needs.answers // job.world), 1)
        micro = min(job.micro, self._answers)
        row = min(-(-(length - 1) // MULTIPLE) * MULTIPLE, job.context)  # the last token is predicted, not read
        super().__init__(d, replace(job, micro=micro, context=row, packed=False, documents=1))
        rows = min(needs.rows, self._answers)
        self._writing = Writing(self._d, rows, length, self._new, needs.bits == 4, job.shards > 1)

    def _asked(self) -> tuple[int, bool]:
        return self._job.micro * self._new, True

    def _base(self) -> dict[str, int]:
        d, needs, job = self._d, self._job.needs, self._whole
        found = added(base_of(d, job), self._writing.held())
        if needs.reference:
            found = added(found, {REFERENCE: job.part(reference_bytes(d, needs, job.context))})
        if needs.scorer is not None:
            found = added(found, {SCORER: scorer_bytes(needs.scorer, job.context)})
        workspace = _STREAMS * CUBLAS.get(job.capability, CUBLAS_ELSE) if HANDLES else 0
        return added(found, {BUFFERS: workspace})

    def _entered(self) -> dict[str, int]:
        """All micro-batches of a step: tokens, places, targets, advantages, weights, log-probabilities."""
        needs, job = self._job.needs, self._job
        kept = 2 * _LONG + WIDE * (2 + needs.reference + (needs.updates > 1))
        batches = -(-self._answers // job.micro)
        found = batches * (rounded(_LONG * job.tokens) + rounded(kept * self._read))
        if any(flash(self._d, job, at) for at in range(self._d.config.layers)):
            found += rounded(4 * job.tokens)
        return {ACTIVATIONS: found}

    def _forward(self, now: dict[str, int]) -> dict[str, int]:
        base = self._base()
        idle = base if self._job.world > 1 else {**base, GRADIENTS: 0}  # DDP's buckets stay
        work = max(self._writing.prefill(), self._writing.merging())
        self._reach(ANSWERS, added(idle, {WORK: work}))
        needs = self._job.needs
        if needs.scorer is not None:
            tokens = self._job.micro * self._length
            self._reach(SCORES, added(idle, {WORK: scoring(needs.scorer, tokens, needs.scorer_likelihood)}))
        if needs.reference:
            self._compare(added(idle, self._entered()))
        return super()._forward(now)


def scorer_bytes(c: ModelConfig, context: int) -> int:
    """Of a reward model, whose weights are read in fp32."""
    return stored_bytes(c, WIDE) + rounded(WIDE * c.dim) + rounded(WIDE) + rotary_tables(c, context)


def scoring(c: ModelConfig, tokens: int, likelihood: bool) -> int:
    """About: its blocks are plain torch's, and each product has a 16-bit copy of its weight."""
    wide = HALF * tokens * c.ff * (2 if c.gated else 1)
    copied = HALF * c.dim * c.ff * (2 if c.gated else 1)
    mlp = wide + 3 * WIDE * tokens * c.ff
    attention = HALF * tokens * (c.heads + 2 * c.kv_heads) * c.head_dim + 4 * WIDE * tokens * c.heads * c.head_dim
    block = 3 * HALF * tokens * c.dim + max(mlp, attention, wide + copied)
    if not likelihood:
        return block
    logits = chunk_rows(tokens, c.vocab_size, WIDE) * c.vocab_size
    head = 2 * HALF * tokens * c.dim + HALF * c.vocab_size * c.dim + 8 * logits
    return max(block, head)
