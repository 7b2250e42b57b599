"""Penalties, logit biases, min_p and grammars: what a step does to the logits of rows that ask for it, before it samples.

The counts of generated tokens lie on the device, so that several token steps can follow each other without the host. Nothing is
allocated, and no step changes, before the first request asks for an adjustment.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.training.serve.request import LogitAdjustments

FREQUENCY, PRESENCE, REPETITION, MIN_P = range(4)


class LogitAdjuster:
    """State of each slot; a slot that no adjusted row uses changes nothing."""

    def __init__(self, slots: int, vocab: int, device: torch.device) -> None:
        self._slots, self._vocab, self._device = slots, vocab, device
        self._owners: dict[int, object] = {}  # the row whose state a slot has
        self._counted: dict[int, int] = {}  # how many generated tokens of that row are in `_counts`
        self._numbers = self._bias = self._counts = self._in_prompt = torch.empty(0)
        self._allowed: Tensor | None = None  # token ids of each slot, once a request had a constraint

    def load(
        self,
        slot: int,
        owner: object,
        adjustments: LogitAdjustments | None,
        prompt: Sequence[int],
        generated: Sequence[int],
    ) -> None:
        """Prepare a row's slot for its next step. Does nothing where the slot already has that row's state."""
        if adjustments is None:
            self._release(slot)
            return
        if self._owners.get(slot) is owner and self._counted[slot] == len(generated):
            return
        if not self._numbers.numel():
            self._allocate()
        self._owners[slot], self._counted[slot] = owner, len(generated)
        self._numbers[slot] = torch.tensor(
            [
                adjustments.frequency_penalty,
                adjustments.presence_penalty,
                adjustments.repetition_penalty,
                adjustments.min_p,
            ]
        )
        self._bias[slot] = 0.0
        if self._allowed is not None:
            self._allowed[slot] = True
        if adjustments.bias:
            ids, values = zip(*adjustments.bias, strict=True)
            self._bias[slot, list(ids)] = torch.tensor(values, device=self._device)
        self._in_prompt[slot] = False
        self._in_prompt[slot, self._known(prompt)] = True
        tokens = self._known(generated)
        self._counts[slot] = torch.bincount(tokens, minlength=self._vocab).to(self._counts.dtype)

    def allow(self, slot: int, allowed: NDArray[np.bool_]) -> None:
        """Let the slot's next token be one of these only. `load` comes first."""
        if self._allowed is None:
            self._allowed = torch.ones(self._slots, self._vocab, dtype=torch.bool, device=self._device)
        mask = torch.zeros(self._vocab, dtype=torch.bool)
        mask[: len(allowed)] = torch.from_numpy(allowed[: self._vocab])
        self._allowed[slot] = mask

    def apply(self, logits: Tensor, slots: Tensor | slice, temperature: Tensor) -> Tensor:
        """Return the adjusted logits [rows, vocabulary] of these slots, in fp32."""
        numbers, counts = self._numbers[slots], self._counts[slots]
        frequency, presence, repetition, min_p = (numbers[:, column, None] for column in range(4))
        x = logits.float() + self._bias[slots]
        seen = (counts > 0) | self._in_prompt[slots]
        x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
        x = x - frequency * counts - presence * (counts > 0)
        if self._allowed is not None:
            x = x.masked_fill(~self._allowed[slots], float("-inf"))
        # p >= min_p * max(p) of the probabilities at the row's temperature; a greedy row (0) keeps its most likely token.
        least = x.amax(-1, keepdim=True) + temperature[:, None].clamp(min=1e-6) * min_p.log()
        return x.masked_fill(x < least, float("-inf"))

    def count(self, tokens: Tensor, slots: Tensor | slice, is_row: Tensor | None) -> None:
        """Add the sampled tokens to the counts. `is_row`: which of the slots were computed for a row; None: all."""
        where = torch.arange(self._slots, device=self._device)[slots]
        times = torch.ones_like(tokens) if is_row is None else is_row.to(tokens.dtype)
        self._counts.index_put_((where, tokens), times.to(self._counts.dtype), accumulate=True)

    def counted(self, slots: Sequence[int], tokens: int) -> None:
        """Note that a step sampled this many tokens for the rows of these slots."""
        for slot in slots:
            if slot in self._counted:
                self._counted[slot] += tokens

    def _release(self, slot: int) -> None:
        """Make the slot change nothing: a row without adjustments uses it now."""
        if self._owners.pop(slot, None) is not None:
            del self._counted[slot]
            self._numbers[slot] = torch.tensor([0.0, 0.0, 1.0, 0.0])
            self._bias[slot] = 0.0
            if self._allowed is not None:
                self._allowed[slot] = True

    def _allocate(self) -> None:
        self._numbers = torch.tensor([0.0, 0.0, 1.0, 0.0], device=self._device).repeat(self._slots, 1)
        self._bias = torch.zeros(self._slots, self._vocab, device=self._device)
        self._counts = torch.zeros(self._slots, self._vocab, dtype=torch.int32, device=self._device)
        self._in_prompt = torch.zeros(self._slots, self._vocab, dtype=torch.bool, device=self._device)

    def _known(self, tokens: Sequence[int]) -> Tensor:
        """Return the ids that the model can generate: a prompt may have others."""
        ids = torch.tensor(tokens, dtype=torch.int64, device=self._device)
        return ids[ids < self._vocab]
