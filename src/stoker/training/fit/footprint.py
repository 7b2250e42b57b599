"""What a model takes of a GPU, exactly where our fused blocks compute it, else about."""

from __future__ import annotations

from stoker.contract.frozen import replace
from stoker.training.fit.answers import GrpoStep
from stoker.training.fit.block import HALF, WIDE
from stoker.training.fit.described import Described, describe
from stoker.training.fit.memory import (
    ACTIVATIONS,
    ADAPTERS,
    BUFFERS,
    GRADIENTS,
    LOSS,
    OPTIMIZER,
    REFERENCE,
    WEIGHTS,
    WORK,
)
from stoker.training.fit.pairs import DpoStep, RewardStep
from stoker.training.fit.terms import CUBLAS, CUBLAS_ELSE, DPO, FORWARD, GRPO, HANDLES, REWARD, SFT, Job, Planned, Step
from stoker.training.model.config import LORA, OFF, QLORA, AdapterConfig, ModelConfig, parameters, unfusable

_MORE = 1.3  # times what fused blocks keep: a guess for compiled and plain ones
# Of transformers' own modules: 16-bit numbers that a layer keeps per token and width (24 to 48 by family), and bytes of
# each logit at the peak of its loss.
_KEPT_WIDTHS, _A_LOGIT = 36, 11
_ADAPTERS = {"adamw": 16, "adamw8bit": 10}  # bytes of a number that learns, with its gradient and moments
_ALL = {"adamw": 18, "adamw8bit": 12, "muon": 14}  # the same, and the 16-bit copy that autocast makes
_LAYER_MATRICES = 7  # linear layers of a block, about square
_STEPS: dict[str, type[Step]] = {REWARD: RewardStep, DPO: DpoStep, GRPO: GrpoStep}  # all others: a step on rows
STAGES = ("pretrain", "midtrain", SFT, *_STEPS)  # that there is a plan for


def _unfused(c: ModelConfig, adapter: AdapterConfig) -> str:
    """Why its blocks are not those that the plan goes through."""
    if adapter.method != OFF and adapter.lora_dropout:
        return "with adapter.lora_dropout blocks run as plain torch"
    return "with dropout attention has a mask of its own" if c.dropout else unfusable(c)


class Footprint:
    def __init__(self, c: ModelConfig, adapter: AdapterConfig, stage: str = SFT) -> None:
        self.config, self.adapter, self._stage = c, adapter, stage
        self.outside = c.engine == "transformers"
        self.described: Described | None = None if self.outside else describe(c, adapter)
        self._unfused = "" if self.outside else _unfused(c, adapter)

    @property
    def why_about(self) -> str:
        """Why it is an estimate; empty: it is not."""
        if self.outside:
            return "this model runs in transformers: an estimate, 30 % off at times"
        if self._unfused:
            return f"{self._unfused}: an estimate, 30 % off at times"
        return "experts are counted about: an estimate" if self.config.experts else ""

    def planned(self, job: Job) -> Planned:
        if self.described is None:
            return self._outside(job)
        found = self._step(job).planned()
        if not self._unfused:
            return found
        more = {term: int(size * _MORE) if term in (ACTIVATIONS, WORK) else size for term, size in found.terms.items()}
        return replace(found, terms=more)

    def _step(self, job: Job) -> Step:
        assert self.described is not None
        return _STEPS.get(self._stage, Step)(self.described, job)

    def can_be_on_host(self) -> bool:
        """Not where answers are written: the engine computes where the embedding lies."""
        return self._stage != GRPO and self.described is not None and self.described.can_be_on_host

    def can_move_kept(self) -> bool:
        """What blocks keep, to the host: compiled ones keep it where it is."""
        return self.described is not None and not self._unfused and self.config.layers > 1

    def can_keep_less(self) -> bool:
        """All but the MLP's first product: fused blocks with SwiGLU."""
        if self.described is None or self._unfused:
            return False
        blocks = (self.described.blocks[kind] for kind in self.described.kinds)
        return all(block.gate_up is not None and not block.plain for block in blocks)

    def host_bytes(self, job: Job) -> int:
        return 0 if self.described is None else self._step(job).host_bytes()

    def moved_bytes(self, job: Job) -> int:
        return 0 if self.described is None else self._step(job).moved_bytes()

    def _outside(self, job: Job) -> Planned:
        c, size, n = self.config, parameters(self.config), job.tokens
        layer = HALF * n * c.dim * _KEPT_WIDTHS
        kept = layer * c.layers if not job.recomputed else layer + HALF * n * c.dim * c.layers
        terms = {ACTIVATIONS: kept, LOSS: _A_LOGIT * n * c.vocab_size}
        if self.adapter.method == OFF:
            terms |= {WEIGHTS: WIDE * size, GRADIENTS: WIDE * size, BUFFERS: HALF * size}
            terms[OPTIMIZER] = (_ALL[job.optimizer] - 10) * size
        else:
            learned = self.adapter.lora_rank * 2 * c.dim * _LAYER_MATRICES * c.layers
            embeddings = min(2 * c.vocab_size * c.dim, size)
            frozen = {LORA: HALF * size, QLORA: HALF * embeddings + (size - embeddings) * 33 // 64}
            terms |= {WEIGHTS: frozen[self.adapter.method], ADAPTERS: WIDE * learned, GRADIENTS: WIDE * learned}
            terms[OPTIMIZER] = (_ADAPTERS.get(job.optimizer, 16) - 8) * learned
        if self._stage == DPO and self.adapter.method == OFF:
            terms[REFERENCE] = WIDE * size
        terms[BUFFERS] = terms.get(BUFFERS, 0) + HANDLES * CUBLAS.get(job.capability, CUBLAS_ELSE)
        return Planned(terms, FORWARD, {FORWARD: sum(terms.values())})
