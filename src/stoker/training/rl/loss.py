"""GRPO's loss: each answer token's clipped surrogate, and its divergence from the model it all began with."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stoker.training.model.decoder import Decoder
from stoker.training.model.logprobs import token_logprobs
from stoker.training.rl.batches import Batch


def token_losses(
    logp: Tensor, old: Tensor, reference: Tensor | None, advantages: Tensor, clip_ratio: float, kl: float
) -> tuple[Tensor, Tensor]:
    """(loss, KL) of each token. KL by k3: exp(r − p) − (r − p) − 1, unbiased and never below 0."""
    ratio = torch.exp(logp - old)
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_ratio, 1 + clip_ratio) * advantages)
    if reference is None:
        return -surrogate, torch.zeros_like(logp)
    apart = reference - logp
    divergence = torch.exp(apart) - apart - 1
    return kl * divergence - surrogate, divergence


class Policy(nn.Module):
    """The decoder with its loss as forward: DDP's exchange hangs on one call of the module it wraps."""

    def __init__(self, decoder: Decoder, *, temperature: float, clip_ratio: float, kl: float) -> None:
        super().__init__()
        self.decoder = decoder
        self.temperature, self.clip_ratio, self.kl = temperature, clip_ratio, kl

    def forward(self, batch: Batch, scale: float) -> tuple[Tensor, Tensor]:
        """(Σ of the token losses × scale, [Σ KL, Σ entropy] without gradient)."""
        logp, entropy = logprobs(self.decoder, batch, self.temperature)
        old = logp.detach() if batch.old is None else batch.old
        losses, divergence = token_losses(logp, old, batch.reference, batch.advantages, self.clip_ratio, self.kl)
        seen = torch.stack([(divergence.detach() * batch.counted).sum(), (entropy * batch.counted).sum()])
        return (losses * batch.counted).sum() * scale, seen


def logprobs(decoder: Decoder, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
    """Of the answers' tokens alone, as they were sampled: at the temperature of the sampling."""
    x = decoder.hidden(batch.inputs).flatten(0, 1).index_select(0, batch.where)
    return token_logprobs(x, decoder.head_weight, batch.targets, temperature, decoder.config.final_cap)
