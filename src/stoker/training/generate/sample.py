"""Sampling the next token. One number decides: where it falls in the probabilities laid end to end by their ids.

It is a hash of (seed, index of the prompt, place in the answer): an answer does not depend on who else is in the batch.
Noise per word of the vocabulary (Gumbel's) would be as good and cost 150,000 hashes a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.training.generate.config import Sampling


def uniforms(seed: int, indexes: Sequence[int], count: int) -> NDArray[np.float32]:
    """[count, rows], in [0, 1): splitmix64's mixing, once per coordinate."""
    rows = np.asarray(indexes, dtype=np.uint64)[None, :]
    places = np.arange(count, dtype=np.uint64)[:, None]
    start = np.full((1, 1), seed % 2**64, dtype=np.uint64)
    mixed = _mix(_mix(_mix(start) + rows) + places)
    return (mixed >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample_token(logits: Tensor, uniform: Tensor, how: Sampling) -> Tensor:
    """[rows, vocabulary] and [rows] -> ids [rows]."""
    if how.greedy:
        return logits.argmax(-1)
    wide = logits.float() / how.temperature
    if how.plain:
        return _place(torch.softmax(wide, -1), uniform)
    kept = min(how.top_k or wide.shape[-1], wide.shape[-1])
    values, ids = torch.topk(wide, kept, dim=-1, sorted=True)
    chances = torch.softmax(values, -1)
    if how.top_p < 1.0:
        before = chances.cumsum(-1) - chances  # the first is always kept
        chances = chances.masked_fill(before >= how.top_p, 0.0)
    return ids.gather(-1, _place(chances, uniform)[:, None])[:, 0]


def sample_rows(
    logits: Tensor,
    uniform: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    filtered: bool,
    draw: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """sample_token where each row has settings of its own, all [rows]. `filtered`: some row leaves tokens out. `draw`: a kernel
    that does it by logits, uniform and temperature where no row does."""
    if draw is not None and not filtered:
        return draw(logits, uniform.contiguous(), temperature.contiguous())
    greedy, warmth = logits.argmax(-1), torch.where(temperature > 0, temperature, 1.0)
    wide = logits.float() / warmth[:, None]
    token = _place(torch.softmax(wide, -1), uniform)
    if filtered:
        values, ids = wide.sort(dim=-1, descending=True)
        behind = torch.arange(wide.shape[-1], device=wide.device) >= top_k[:, None]
        chances = torch.softmax(values.masked_fill(behind & (top_k > 0)[:, None], float("-inf")), -1)
        before = chances.cumsum(-1) - chances
        chances = chances.masked_fill((before >= top_p[:, None]) & (top_p < 1)[:, None], 0.0)
        kept = ids.gather(-1, _place(chances, uniform)[:, None])[:, 0]
        token = torch.where((top_k > 0) | (top_p < 1), kept, token)
    return torch.where(temperature > 0, token, greedy)


def _place(chances: Tensor, uniform: Tensor) -> Tensor:
    """The first whose running sum passes `uniform`, below 1, of the whole: never one of chance 0."""
    running = chances.cumsum(-1)
    found = torch.searchsorted(running, uniform[:, None] * running[:, -1:], right=True)[:, 0]
    # Of numbers that are NaN an id all the same, so that whoever looks at them can say so.
    return found.clamp(max=chances.shape[-1] - 1)
