"""A step's answers become one or several optimizer steps: exact over ranks with unlike numbers of answers and tokens.

Rank r runs its own number of micro-batches, all but the last without an exchange. Its loss is Σ of its token losses ×
ranks ÷ tokens of all ranks, so the mean over ranks that DDP takes is the mean over all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stoker.contract.frozen import frozen, replace
from stoker.training.model.attention import kernels
from stoker.training.model.decoder import Decoder
from stoker.training.model.loss import token_logprobs
from stoker.training.model.reference import Reference
from stoker.training.optim.loss_scale import LossScale
from stoker.training.optim.optimizer import Optimizer, gradient_norm
from stoker.training.parallel.group import Group, no_sync, wrap
from stoker.training.rl.config import GrpoConfig
from stoker.training.rl.rollout import Answer

# Answers as micro-batches: sorted by length, padded on the right to a multiple of 16, so that there are few shapes and
# little padding.

MULTIPLE = 16


@frozen
class Row:
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    advantage: float
    sampled: tuple[float, ...] = ()  # the answer's log-probabilities where it was written; empty: not kept
    learn: tuple[bool, ...] = ()  # whether each of the answer's tokens is learned; empty: all are

    @property
    def learned(self) -> NDArray[np.int64]:
        """Return the places of the learned tokens in the answer."""
        return np.flatnonzero(self.learn) if self.learn else np.arange(len(self.answer))


@frozen
class Batch:
    inputs: Tensor  # [B, T]; padding is behind what is read, and attention is causal: it needs no mask
    where: Tensor  # [N]: flat places in [B, T] whose successors are the answers' tokens
    targets: Tensor  # [N]
    advantages: Tensor  # [N]
    counted: Tensor  # [N]: 1; 0 in the batch of a rank that has none
    sampled: Tensor | None = None  # [N]: log-probabilities where the answers were written
    old: Tensor | None = None  # [N]: log-probabilities when the answers were sampled; None: those of this very pass
    reference: Tensor | None = None


def arrange(rows: Sequence[Row], micro: int, context: int, device: torch.device) -> list[Batch]:
    """`context`: the longest row. At least one batch: a rank without answers takes part, with a token that counts 0."""
    if not rows:
        return [_batch([Row((0,), (0,), 0.0)], context, device, 0.0)]
    # Stable: the same rows give the same batches.
    ordered = sorted(rows, key=lambda row: len(row.prompt) + len(row.answer))
    return [_batch(ordered[begin : begin + micro], context, device, 1.0) for begin in range(0, len(ordered), micro)]


def _batch(rows: Sequence[Row], context: int, device: torch.device, counted: float) -> Batch:
    longest = max(len(row.prompt) + len(row.answer) - 1 for row in rows)  # the last token is predicted, not read
    T = min(-(-longest // MULTIPLE) * MULTIPLE, context)
    inputs = np.zeros((len(rows), T), dtype=np.int64)
    where = []
    for number, row in enumerate(rows):
        read = (*row.prompt, *row.answer[:-1])
        inputs[number, : len(read)] = read
        where.append(number * T + len(row.prompt) - 1 + row.learned)
    targets = np.concatenate([np.asarray(row.answer, dtype=np.int64)[row.learned] for row in rows])
    advantages = np.repeat([row.advantage for row in rows], [len(row.learned) for row in rows]).astype(np.float32)
    weights = np.full(len(targets), counted, dtype=np.float32)
    put = [torch.from_numpy(one).to(device) for one in (inputs, np.concatenate(where), targets, advantages, weights)]
    if not all(len(row.sampled) == len(row.answer) for row in rows):
        return Batch(*put)
    sampled = np.concatenate([np.asarray(row.sampled, dtype=np.float32)[row.learned] for row in rows])
    return replace(Batch(*put), sampled=torch.from_numpy(sampled).to(device))


# GRPO's loss: each answer token's clipped surrogate, and its divergence from the model it all began with.


@frozen
class Clip:
    low: float
    high: float
    importance: float = 0.0  # the most that a token may weigh because the sampler gave it too little; 0: all weigh 1


def token_losses(
    logp: Tensor, old: Tensor, reference: Tensor | None, advantages: Tensor, clip: Clip, kl: float,
    sampled: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(loss, KL) of each token. KL by k3: exp(r − p) − (r − p) − 1, unbiased and never below 0. `sampled`: log-probabilities
    by which the answers were really sampled, where that is to be corrected for.
    """
    ratio = torch.exp(logp - old)
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - clip.low, 1 + clip.high) * advantages)
    if sampled is not None:
        surrogate = surrogate * torch.exp(old - sampled).clamp(max=clip.importance)
    if reference is None:
        return -surrogate, torch.zeros_like(logp)
    apart = reference - logp
    divergence = torch.exp(apart) - apart - 1
    return kl * divergence - surrogate, divergence


class Policy(nn.Module):
    """The decoder with its loss as forward: DDP's exchange hangs on one call of the module it wraps."""

    def __init__(
        self, decoder: Decoder, *, temperature: float, clip_ratio: float, kl: float, clip_high: float = 0.0,
        importance_cap: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.decoder = decoder
        self.temperature, self.kl = temperature, kl
        self.clip = Clip(clip_ratio, clip_high or clip_ratio, importance_cap)

    def forward(self, batch: Batch, scale: float) -> tuple[Tensor, Tensor]:
        """(Σ of the token losses × scale, [Σ KL, Σ entropy] without gradient; with importance weights Σ mismatch and how many
        were capped, too).
        """
        logp, entropy = logprobs(self.decoder, batch, self.temperature)
        old = logp.detach() if batch.old is None else batch.old
        sampled = batch.sampled if self.clip.importance else None
        losses, divergence = token_losses(logp, old, batch.reference, batch.advantages, self.clip, self.kl, sampled)
        numbers = [divergence.detach(), entropy]
        if self.clip.importance:
            apart = torch.zeros_like(old) if sampled is None else sampled - old
            numbers += [apart, (torch.exp(-apart) > self.clip.importance).to(apart.dtype)]
        seen = torch.stack([(number * batch.counted).sum() for number in numbers])
        return (losses * batch.counted).sum() * scale, seen


def logprobs(decoder: Decoder, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
    """Of the answers' tokens alone, as they were sampled: at the temperature of the sampling."""
    x = decoder.hidden(batch.inputs).flatten(0, 1).index_select(0, batch.where)
    return token_logprobs(x, decoder.head_weight, batch.targets, temperature, decoder.config.final_cap)


# How much better an answer is than the others to its prompt. Pure.


EPSILON = 1e-4


def advantages(rewards: Tensor, scaled: bool) -> Tensor:
    """[prompts, group] to the same shape. Equal rewards teach nothing: exactly 0, whatever rounding makes of them. NaN: an
    answer that is left out of its group.
    """
    if bool(rewards.isnan().any()):
        return torch.stack([_with_missing(group, scaled) for group in rewards])
    above = rewards - rewards.mean(1, keepdim=True)
    if scaled:
        above = above / (above.square().mean(1, keepdim=True).sqrt() + EPSILON)
    alike = (rewards == rewards[:, :1]).all(1, keepdim=True)
    return torch.where(alike, torch.zeros_like(above), above)


def _with_missing(group: Tensor, scaled: bool) -> Tensor:
    """Return one prompt's advantages among the answers that have a reward, and 0 for those whose reward is NaN."""
    known = ~group.isnan()
    found = torch.zeros_like(group)
    if known.any():
        found[known] = advantages(group[known][None], scaled)[0]
    return found


@frozen
class Learned:
    """The same on all ranks; means over the step's tokens, of its updates' norms."""

    loss: float
    kl: float
    entropy: float
    norm: float
    finite: bool  # else one update or more was left out
    skipped: int = 0  # updates left out because a gradient overflowed in fp16
    mismatch: float | None = None  # KL of the sampler from the weights that learn, where importance weights are used
    capped: float | None = None  # share of the tokens whose importance weight was capped


@frozen
class _Part:
    """What one update learns from."""

    batches: tuple[Batch, ...]
    tokens: int  # of all ranks


class Updater:
    def __init__(
        self,
        model: Decoder,
        reference: Reference | None,
        optimizer: Optimizer,
        group: Group,
        c: GrpoConfig,
        *,
        temperature: float,
        micro: int,
        attention: str,
        before_update: Callable[[], None] = lambda: None,
        loss_scale: LossScale | None = None,
        exchange_each: bool = False,
    ) -> None:
        """`before_update`: a checkpoint's snapshot must be out before the weights change. `loss_scale`: of fp16.
        `exchange_each`: of a model in shards, gradients of each micro-batch."""
        self._model, self._reference, self._optimizer, self._group, self._c = model, reference, optimizer, group, c
        self._temperature, self._micro, self._attention = temperature, micro, attention
        clip = {"clip_ratio": c.clip_ratio, "clip_high": c.clip_ratio_high, "importance_cap": c.weight_cap}
        self._wrapped = wrap(Policy(model, temperature=temperature, kl=c.kl, **clip), group)
        self._sharded, self._each = group.strategy == "fsdp", exchange_each
        self._before_update, self._loss_scale = before_update, loss_scale
        self.done = 0  # updates that counted: what the optimizer counts

    def resume(self, done: int) -> None:
        self.done = done
        self._optimizer.set_count(done)

    def settle(self) -> None:
        """As recipes/build.py: without two backwards for nothing, a resume would add in another order."""
        if self._group.world < 3 or self._sharded:
            return
        for _ in range(2):
            self._backward(arrange([], self._micro, self._model.context_length, self._group.device), 0.0)
        self._optimizer.zero()

    def learn(
        self, answers: Sequence[Answer], advantages: Sequence[float], lengths: Sequence[int], share: float
    ) -> Learned:
        """`answers` are this rank's; `lengths`: learned tokens of all ranks' answers, by place, 0 of one that is left out."""
        with kernels(self._attention):
            parts = self._parts(answers, advantages, lengths)
            told = [self._update(part, share) for part in parts]
        total = sum(part.tokens for part in parts)
        loss, kl, entropy = (sum(one[n] for one in told) / total for n in range(3))
        norm, finite = sum(one[3] for one in told) / len(told), all(one[4] == 0 for one in told)
        beyond: list[float | None] = [None, None]
        if self._c.weight_cap:
            beyond = [sum(one[n] for one in told) / total for n in (6, 7)]
        return Learned(loss, kl, entropy, norm, finite, sum(one[5] > 0 for one in told), *beyond)

    def _parts(self, answers: Sequence[Answer], advantages: Sequence[float], lengths: Sequence[int]) -> list[_Part]:
        """Answers dealt out to the updates by place: the same for any number of ranks, with some of every prompt's."""
        count = self._c.updates
        rows = [
            (answer.place, Row(tuple(answer.prompt.ids), answer.ids, advantage, answer.sampled, answer.learn))
            for answer, advantage in zip(answers, advantages, strict=True)
            if lengths[answer.place]
        ]
        found = []
        for number in range(count):
            mine = [row for place, row in rows if place % count == number]
            batches = self._even(arrange(mine, self._micro, self._model.context_length, self._group.device))
            found.append(
                _Part(tuple(self._with_fixed(batch) for batch in batches), max(sum(lengths[number::count]), 1))
            )
        return found

    def _even(self, batches: list[Batch]) -> list[Batch]:
        """In shards all ranks make as many passes: what is short of them is made up with batches that count nothing."""
        if not self._sharded:
            return batches
        most: int = max(self._group.all(len(batches)))
        nothing = arrange([], self._micro, self._model.context_length, self._group.device)
        return batches + nothing * (most - len(batches))

    @torch.no_grad()
    def _with_fixed(self, batch: Batch) -> Batch:
        """What the updates don't change. With a single one the old log-probabilities are those of its own pass."""
        if self._reference is not None:
            with self._reference() as model:
                batch = replace(batch, reference=logprobs(model, batch, self._temperature)[0])
        return replace(batch, old=logprobs(self._model, batch, self._temperature)[0]) if self._c.updates > 1 else batch

    def _backward(self, batches: Sequence[Batch], scale: float | Tensor) -> Tensor:
        """[Σ loss × scale, Σ KL, Σ entropy, and with importance weights Σ mismatch, Σ capped]."""
        total = torch.zeros(5 if self._c.weight_cap else 3, device=self._group.device)
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            with no_sync(self._model if self._sharded else self._wrapped, last or self._each, last):
                loss, seen = self._wrapped(batch, scale)
                loss.backward()
            total += torch.cat([loss.detach()[None], seen])
        return total

    def _update(self, part: _Part, share: float) -> tuple[float, ...]:
        """(Σ loss, Σ KL, Σ entropy over all ranks' tokens, gradient norm, whether it was bad, whether it was skipped, and
        with importance weights Σ mismatch, Σ capped).
        """
        world, scaled = self._group.world, self._loss_scale
        mean = world / part.tokens
        total = self._backward(part.batches, mean if scaled is None else mean * scaled.value)
        norm = gradient_norm(self._optimizer.parameters)
        if scaled is not None:
            total[0], norm = total[0] / scaled.value, norm / scaled.value
        # A gradient that one rank alone spoils after the exchange is bad on all: they skip the same updates, or their
        # weights part.
        spoiled = (~(torch.isfinite(norm) & torch.isfinite(total[0]))).float()
        values = self._group.sum(torch.cat([total, spoiled[None]]))
        bad, skipped = (values[-1] > 0).float(), torch.zeros_like(values[-1])
        if scaled is not None:
            skipped = bad * torch.isfinite(values[0])
            bad = torch.maximum(bad - skipped, scaled.lasting(skipped))
        self._before_update()
        self._optimizer.step(share, norm, torch.maximum(bad, skipped), None if scaled is None else scaled.value)
        if scaled is not None:
            scaled.update(skipped, bad)
        self._optimizer.zero()
        told = torch.cat([values[:3], norm[None], bad[None], skipped[None], values[3:-1]])
        loss, kl, entropy, size, broken, left_out, *mismatch = told.tolist()
        self.done += not (broken or left_out)
        return loss / world * part.tokens, kl, entropy, size, broken, left_out, *mismatch
