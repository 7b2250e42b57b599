"""A batch on the CPU, operation by operation. Rows that ended leave the batch as soon as half of it has ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from stoker.training.generate import plain
from stoker.training.generate.cache import Cache, holes
from stoker.training.generate.forward import angles, blocks, logits_of, prefill
from stoker.training.generate.sample import Sampling, sample_token, uniforms
from stoker.training.generate.weights import Weights
from stoker.training.model.config import ModelConfig

PREFILL_TOKENS = 1 << 13  # at once: the feed-forward layer's activations stay below 1 GB for widths up to 32 K


class Eager:
    def __init__(self, w: Weights, c: ModelConfig, cos: Tensor, sin: Tensor, rows: int, length: int) -> None:
        self._weights, self._config = w, c
        self._cos, self._sin = angles(cos[:length], sin[:length])
        self._cache = Cache(c, rows, length, w.embed.dtype, w.embed.device)

    def forget(self) -> None:
        """Nothing here keeps an address of the weights."""

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        indexes: Sequence[int],
        new_tokens: int,
        stop: Tensor,
        how: Sampling,
        seed: int,
    ) -> Iterator[Tensor]:
        """After each token: what is written so far, [rows, so many]."""
        w, c = self._weights, self._config
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        longest = int(lengths.max())
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.as_tensor(prompt, dtype=torch.int64)
        noise = torch.from_numpy(uniforms(seed, indexes, 1 if how.greedy else new_tokens)).expand(new_tokens, -1)
        mask = holes(lengths, longest, self._cache.length, w.embed.dtype) if int(lengths.min()) < longest else None
        logits = self._prefill(ids, lengths)
        written = torch.zeros(len(prompts), new_tokens, dtype=torch.int64)
        rows = torch.arange(len(prompts))
        alive = torch.ones(len(prompts), dtype=torch.bool)
        for place in range(new_tokens):
            token = sample_token(logits, noise[place, rows], how)
            written[rows, place] = token
            yield written[:, : place + 1]
            alive &= ~stop[token]
            left = int(alive.sum())
            if left == 0 or place + 1 == new_tokens:
                return
            if 2 * left <= len(alive):
                kept = alive.nonzero()[:, 0]
                self._cache.keep(kept, longest + place)
                rows, token, lengths, alive = rows[kept], token[kept], lengths[kept], alive[kept]
                mask = mask if mask is None else mask[kept]
            slot = longest + place
            seen = None if mask is None else mask[..., : slot + 1]

            def attention(q: Tensor, cached: Tensor, end: int = slot + 1, seen: Tensor | None = seen) -> Tensor:
                return plain.attend(q, cached[:, :, :, :end], seen)

            position = lengths + place
            kv = self._cache.kv[:, :, : len(rows)]
            x, delta = blocks(w, c, plain, token, self._cos[position], self._sin[position], kv, slot, 1, attention)
            logits = logits_of(w, plain, x, delta)

    def _prefill(self, ids: Tensor, lengths: Tensor) -> Tensor:
        at_once = max(PREFILL_TOKENS // ids.shape[1], 1)
        found = []
        for row in range(0, len(ids), at_once):
            part = slice(row, min(row + at_once, len(ids)))
            found.append(
                prefill(
                    self._weights,
                    self._config,
                    plain,
                    ids[part],
                    lengths[part],
                    self._cos,
                    self._sin,
                    self._cache.kv[:, :, part],
                )
            )
        return torch.cat(found)
