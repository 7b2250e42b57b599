"""A batch through transformers' own module and its own cache, for models that no family of ours knows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from stoker.training.generate.sample import Sampling, sample_token, uniforms
from stoker.training.model.outside import Outside


class Borrowed:
    """Prompts of one length go together: padding in front is not the same to every module."""

    def __init__(self, model: Outside, vocab: int) -> None:
        self._model, self._vocab = model, vocab

    def forget(self) -> None:
        """Nothing here keeps an address of the weights."""

    def run(
        self, prompts: Sequence[Sequence[int]], indexes: Sequence[int], new_tokens: int, stop: Tensor, how: Sampling,
        seed: int,
    ) -> Iterator[Tensor]:  # fmt: skip
        """After each token of a single prompt, else at the end: what is written, [rows, so many]."""
        noise = torch.from_numpy(uniforms(seed, indexes, new_tokens)).to(stop.device)
        written = torch.zeros(len(prompts), new_tokens, dtype=torch.int64, device=stop.device)
        for length in sorted({len(prompt) for prompt in prompts}):
            rows = [row for row, prompt in enumerate(prompts) if len(prompt) == length]
            ids = torch.tensor([list(prompts[row]) for row in rows], device=stop.device)
            for place, token in enumerate(self._tokens(ids, noise[:, rows], stop, how)):
                written[rows, place] = token
                if len(prompts) == 1:
                    yield written[:, : place + 1]
        if len(prompts) > 1:
            yield written

    def _tokens(self, ids: Tensor, noise: Tensor, stop: Tensor, how: Sampling) -> Iterator[Tensor]:
        """The next of each row, until all have ended."""
        cache: Any = None
        given, alive = ids, torch.ones(len(ids), dtype=torch.bool, device=ids.device)
        for uniform in noise:
            logits, cache = self._model.next_logits(given, cache)
            token = sample_token(logits[:, : self._vocab], uniform, how)
            yield token
            alive &= ~stop[token]
            if not alive.any():
                return
            ids = torch.cat([ids, token[:, None]], 1)
            given = ids if cache is None else token[:, None]
