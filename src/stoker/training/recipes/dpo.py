"""Direct Preference Optimisation: the model learns from pairs of answers which of them to prefer, without a reward model.

    stoker train dpo --model.load sft/hf --dpo.pairs pairs.jsonl
    stoker train dpo --model.load sft/hf --dpo.pairs ultrafeedback.jsonl.gz --dpo.held_out test.jsonl.gz --context-length 2048

data.context_length must hold both answers of a pair with their prompt. supervised.py makes the steps; here is the loss
(Rafailov et al. 2023, arXiv:2305.18290), on packed pairs:

    r(x, y) = β (log p(y | x) − log q(y | x))        the implicit reward: p the model, q the one it began with
    sigmoid:  −log σ(r(x, y⁺) − r(x, y⁻))
    ipo:      (Δ − 1 / 2β)²,  Δ the difference of the log-ratios      (Azar et al. 2023, arXiv:2310.12036)

y⁺ is the better answer. Only the answers' tokens count; with `dpo.length_normalised` as their mean. Summed over pairs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stoker.training.config.schema import Config
from stoker.training.data.reader import IGNORED
from stoker.training.loop.feeder import Rows
from stoker.training.loop.learner import Learner, Validation
from stoker.training.loop.samples import Example
from stoker.training.loop.say import Voice
from stoker.training.loop.step import Parts
from stoker.training.model import hf, ready
from stoker.training.model.attention import Documents, begins, documents
from stoker.training.model.config import OFF, ModelConfig
from stoker.training.model.decoder import Decoder
from stoker.training.model.loss import token_logprobs
from stoker.training.model.outside import Outside
from stoker.training.parallel.group import Group
from stoker.training.parallel.sharded import shard
from stoker.training.recipes import build, stage
from stoker.training.recipes.supervised import PairStage, learn_pairs
from stoker.training.reward.config import DpoConfig
from stoker.training.reward.model import held_out, margins
from stoker.training.reward.pairs import PairRows

NUMBERS = ("reward_accuracy", "reward_margin", "logp_chosen", "logp_rejected")


def answer_logprobs(model: Decoder | Outside, inputs: Tensor, packed: Documents, normalised: bool) -> Tensor:
    """[B, T]: log p of the answer of each token's segment, up to there. `packed`: of PairRows(answers=True)."""
    rows, length = inputs.shape
    whole, answer = with_prompts(packed)
    following = inputs[:, 1:].flatten()
    if isinstance(model, Outside):
        logits = model.logits(inputs, whole)[:, :-1].flatten(0, 1)
        each = -F.cross_entropy(logits.float(), following, reduction="none")
    else:
        x = model.hidden(inputs, whole)[:, :-1].flatten(0, 1)
        each, _ = token_logprobs(x, model.head_weight, following, 1.0, model.config.final_cap)
    told = F.pad(each.view(rows, length - 1), (1, 0)).masked_fill(~answer, 0.0)
    new = begins(whole.segments)
    place = torch.arange(length, device=inputs.device).expand_as(new)
    begin = torch.where(new, place, 0).cummax(dim=1).values
    found = _since(told, begin)
    return found / _since(answer.float(), begin).clamp(min=1.0) if normalised else found


def with_prompts(packed: Documents) -> tuple[Documents, Tensor]:
    """Documents of a prompt with its answer, and which tokens are an answer's. In `packed` these are documents of their
    own: the last of them takes the beginning of the first, and the others are left empty, so that nothing waits for the
    device.
    """
    own = packed.segments >> 1
    kept = F.pad(begins(own).flatten(), (0, 1), value=True)[packed.offsets.long()]
    offsets = torch.where(kept, packed.offsets, 0).cummax(dim=0).values
    answer = ((packed.segments & 1) == 1) & (own >= 0)
    return Documents(own, offsets, own.shape[1]), answer


def _since(values: Tensor, begin: Tensor) -> Tensor:
    """Sums along a row from where each token's segment begins. In float64: a row holds many answers."""
    running = F.pad(values.double().cumsum(1), (1, 0))
    return (running[:, 1:] - running.gather(1, begin)).float()


class _Frozen(nn.Module):
    """The model as it was before the first step. Called like any module: FSDP2 gathers its weights for the call."""

    normalised = False

    def forward(
        self,
        inputs: Tensor,
        targets: Tensor | None = None,
        scale: Tensor | None = None,
        packed: Documents | None = None,
    ) -> Tensor:
        assert packed is not None and isinstance(self, (Decoder, Outside))
        return answer_logprobs(self, inputs, packed, self.normalised)


class Reference(_Frozen, Decoder):
    pass


class OutsideReference(_Frozen, Outside):
    """By transformers' own module."""


class DpoModel(nn.Module):
    """`reference` is not a part of this module: it is neither saved nor trained. Without one this very model computes what
    it did when it began.
    """

    reference: Decoder | Outside | None
    rule: DpoConfig
    begun: Callable[[], AbstractContextManager[Any]] | None = None

    def __init__(self, c: ModelConfig, context_length: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(c, context_length, dtype)
        self.told: Tensor | None = None  # sums over pairs since `numbers` was asked: how many, and NUMBERS

    def forward(
        self,
        inputs: Tensor,
        targets: Tensor | None = None,
        scale: Tensor | None = None,
        packed: Documents | None = None,
    ) -> Tensor:
        """With targets the sum of the pairs' losses times `scale`; without, [2, B, T]: log p and log q."""
        if packed is None:  # a trial step without pairs
            packed = documents(torch.zeros(inputs.shape, dtype=torch.int32), inputs.device)
            assert packed is not None
        assert isinstance(self, (Decoder, Outside))
        theirs = self.reference_logprobs(inputs, packed)
        mine = answer_logprobs(self, inputs, packed, self.rule.length_normalised)
        if targets is None:
            return torch.stack([mine, theirs])
        counted = targets != IGNORED
        ratio = margins(mine - theirs, targets)
        loss = (pair_losses(ratio, self.rule) * counted).sum()
        if self.training:
            with torch.no_grad():
                self._remember(mine, ratio, targets, counted)
        return loss if scale is None else loss * scale

    def reference_logprobs(self, inputs: Tensor, packed: Documents) -> Tensor:
        """As `answer_logprobs`, of the model that training began with. Before the policy's pass: nothing of that is kept yet."""
        with torch.no_grad():
            if self.reference is not None:
                found: Tensor = self.reference(inputs, None, None, packed)
                return found
            assert self.begun is not None
            with self.begun() as model:
                return answer_logprobs(model, inputs, packed, self.rule.length_normalised)

    def _remember(self, mine: Tensor, ratio: Tensor, targets: Tensor, counted: Tensor) -> None:
        rejected = mine.gather(1, targets.clamp(min=0))
        values = (torch.ones_like(ratio), (ratio > 0).float(), self.rule.beta * ratio, mine, rejected)
        sums = torch.stack([(value * counted).sum() for value in values])
        self.told = sums if self.told is None else self.told + sums

    def numbers(self) -> dict[str, Tensor]:
        """Means over this rank's pairs since they were asked for last, on the device: nothing waits for it."""
        if self.told is None:
            return {}
        means = self.told[1:] / self.told[0]
        self.told = None
        return dict(zip(NUMBERS, means.unbind(), strict=True))


def pair_losses(ratio: Tensor, rule: DpoConfig) -> Tensor:
    """`ratio`: how much more the better answer's probability has grown than the worse one's, in nats."""
    if rule.loss == "ipo":
        return (ratio - 1 / (2 * rule.beta)).square()
    return F.softplus(-rule.beta * ratio)


class Measured(NamedTuple):
    """Of each held-out pair, in the order of the rows."""

    chosen: Tensor  # log p(y⁺ | x)
    rejected: Tensor
    ratio: Tensor  # as in pair_losses


def measured(model: nn.Module, samples: Rows, group: Group, micro: int) -> Measured:
    def values(both: Tensor, targets: Tensor) -> Tensor:
        policy, reference = both
        return torch.stack([policy, policy.gather(1, targets.clamp(min=0)), margins(policy - reference, targets)])

    return Measured(*held_out(model, samples, group, micro, values))


def learner(reference: Decoder | Outside | None, rule: DpoConfig) -> Learner:
    """`reference`: a copy of its own; None: adapters learn, and the model under them is the reference."""

    def measure(model: nn.Module, samples: Rows, group: Group, *, tokens: int, micro: int) -> Validation:
        """Loss per pair, and the share of pairs whose better answer has the higher implicit reward."""
        found = measured(model, samples, group, micro)
        loss = pair_losses(found.ratio, rule).mean().item()
        return Validation(loss, None, len(found.ratio), (found.ratio > 0).double().mean().item(), means(found, rule))

    # As attributes of a class: a module's own would be its children, saved and trained.
    given = {"reference": reference, "rule": rule}
    kind, outside = (type("DpoPolicy", (DpoModel, base), given) for base in (Decoder, Outside))
    return Learner(
        kind, outside=outside, measure=measure, numbers=DpoModel.numbers, compares=reference is None, examples=examples
    )


def examples(rows: Rows, count: int) -> Iterator[Example]:
    """Prompts with their better answers."""
    assert isinstance(rows, PairRows)
    for pair in rows.pairs:
        first = int(pair.learned.argmax())
        yield Example(tuple(pair.better[:first].tolist()), tuple(pair.better[pair.learned].tolist()))


def means(found: Measured, rule: DpoConfig) -> dict[str, float]:
    values = ((found.ratio > 0).double(), rule.beta * found.ratio, found.chosen, found.rejected)
    return {name: value.mean().item() for name, value in zip(NUMBERS, values, strict=True)}


def reference_of(c: Config, vocab_size: int, group: Group, voice: Voice) -> Reference | OutsideReference:
    """The weights of `model.load` in the activations' dtype, sharded as the model is. A resumed run reads them again."""
    weights, shape = build.model_shape(c.model, vocab_size, voice)
    dtype = build.dtype_of(c, group)
    ready.arithmetic(c.compute, dtype)
    model: Reference | OutsideReference
    if shape.engine == "transformers":
        with torch.device(group.device):
            model = OutsideReference(shape, c.data.context_length, dtype)  # fp32: its module casts where it computes
    else:
        with torch.device("meta"):
            model = Reference(shape, c.data.context_length, dtype).to(dtype)
    model.normalised = c.dpo.length_normalised
    ready.make_ready(model, c.compute, group.device, lambda line: None)
    if group.strategy == "fsdp" and isinstance(model, Reference):
        shard(model, group, dtype)
        model.place(group.device, group.home)
    else:
        model.place(group.device)
    hf.load(model, weights, lambda line: None)
    model.requires_grad_(False)
    stored = next(model.parameters()).dtype
    voice.say_once(f"reference: {weights}, frozen, {str(stored)[6:]}")
    return model.eval()


def measure(c: Config, parts: Parts, held_out: PairRows) -> tuple[list[bool], dict[str, Any]]:
    found = measured(parts.wrapped, held_out, parts.group, parts.micro)
    return (found.ratio > 0).tolist(), means(found, c.dpo)


def main(argv: list[str]) -> int:
    line = "held-out pairs with the higher implicit reward on the better answer"

    def begun(c: Config, vocab_size: int, group: Group, voice: Voice) -> Learner:
        if c.adapter.method == OFF:
            return learner(reference_of(c, vocab_size, group, voice), c.dpo)
        voice.say_once("reference: the model as it begins, without a copy of its own")
        return learner(None, c.dpo)

    return learn_pairs(argv, PairStage("dpo", line, begun, measure, answers=True))


if __name__ == "__main__":
    sys.exit(stage.run(main))
