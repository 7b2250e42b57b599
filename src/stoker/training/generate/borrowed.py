"""Tokens of a module that transformers computes, over its own cache where it has one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from stoker.training.generate.config import Sampling
from stoker.training.generate.sample import sample_token, uniforms
from stoker.training.model.outside import Outside


class Borrowed:
    """Prompts of one length go together, `rows` at once: padding in front is not the same to every module."""

    def __init__(self, model: Outside, vocab: int, rows: int) -> None:
        self._model, self._vocab, self._rows = model, vocab, rows
        self._device = next(model.parameters()).device
        self.prompt_tokens = 0

    def tokens(
        self, prompts: Sequence[Sequence[int]], indexes: Sequence[int], new_tokens: int, stop: frozenset[int], how: Sampling,
        seed: int,
    ) -> Iterator[tuple[int, int]]:  # fmt: skip
        """(which prompt, its next token). Those of a prompt that has ended may go on until all beside it have."""
        noise = torch.from_numpy(uniforms(seed, indexes, new_tokens)).to(self._device)
        self.prompt_tokens += sum(map(len, prompts))
        for length in sorted({len(prompt) for prompt in prompts}):
            alike = [number for number, prompt in enumerate(prompts) if len(prompt) == length]
            for begin in range(0, len(alike), self._rows):
                some = alike[begin : begin + self._rows]
                ids = torch.tensor([list(prompts[number]) for number in some], device=self._device)
                for tokens in self._steps(ids, noise[:, some], stop, how):
                    yield from zip(some, tokens, strict=True)

    def _steps(self, ids: Tensor, noise: Tensor, stop: frozenset[int], how: Sampling) -> Iterator[list[int]]:
        """The next token of each row, until all have ended."""
        cache: Any = None
        given, ended = ids, set[int]()
        for uniform in noise:
            with torch.inference_mode():  # not across the yield: the caller's own work is none of ours
                logits, cache = self._model.next_logits(given, cache)
                token = sample_token(logits[:, : self._vocab], uniform, how)
                ids = torch.cat([ids, token[:, None]], 1)
                given = ids if cache is None else token[:, None]
            tokens: list[int] = token.tolist()
            yield tokens
            ended.update(row for row, one in enumerate(tokens) if one in stop)
            if len(ended) == len(tokens):
                return
