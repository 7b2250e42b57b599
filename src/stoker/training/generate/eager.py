"""A batch on the CPU, operation by operation. Rows that ended leave the batch as soon as half of it has ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from stoker.training.generate import plain
from stoker.training.generate.cached import Blocks, Cache, Prompts, Weights, as_mask, padded, seen
from stoker.training.generate.sample import Sampling, sample_token, uniforms

PREFILL_TOKENS = 1 << 13  # at once: the feed-forward layer's activations stay below 1 GB for widths up to 32 K


class Eager:
    def __init__(self, w: Weights, rows: int, length: int) -> None:
        self._weights, self._blocks = w, Blocks(w, plain)
        self._angles = self._blocks.angles(lambda table: table[:length])
        self._cache = Cache(w, rows, length)

    def forget(self) -> None:
        """Nothing here keeps an address of the weights."""

    def run(
        self, prompts: Prompts, indexes: Sequence[int], new_tokens: int, stop: Tensor, how: Sampling, seed: int
    ) -> Iterator[Tensor]:
        """After each token: what is written so far, [rows, so many]."""
        c, blocks, dtype = self._weights.config, self._blocks, self._weights.embed.dtype
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        longest = int(lengths.max())
        noise = torch.from_numpy(uniforms(seed, indexes, 1 if how.greedy else new_tokens)).expand(new_tokens, -1)
        slots = torch.arange(self._cache.length)
        holes = int(lengths.min()) < longest
        ahead = as_mask(seen(slots, lengths, longest, self._cache.length), dtype) if holes else None
        logits = blocks.prefill(padded(prompts, longest), lengths, self._angles, self._cache.kv, PREFILL_TOKENS)
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
                ahead = ahead if ahead is None else ahead[kept]
            slot = longest + place
            whole = None if ahead is None else ahead[..., : slot + 1]
            masks = [
                as_mask(seen(slots[: slot + 1], lengths, longest, slot, window), dtype) if window else whole
                for window in self._weights.windows
            ]

            def attention(
                q: Tensor, kv: Tensor, view: int, end: int = slot + 1, masks: list[Tensor | None] = masks
            ) -> Tensor:
                return plain.attend(q, kv[:, :, :, :end], masks[view], c.attention_scale or None, c.attention_cap)

            cached = self._cache.kv[:, :, : len(rows)]
            x, delta = blocks.run(token, lengths + place, self._angles, cached, slot, 1, attention)
            logits = blocks.logits(x, delta)
