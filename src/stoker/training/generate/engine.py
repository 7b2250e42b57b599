"""Answers of a decoder, a batch at a time.

    engine = Engine(model, rows=64, length=512)
    answers = engine.generate(prompts, new_tokens=128, stop={end}, temperature=1.0, seed=7)
    …                                          # a training step
    engine.refresh()

An answer depends on the seed and on the prompt's index, not on the batch it was written in, up to the rounding of products of another size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from stoker.contract.names import EX_USAGE, Refusal
from stoker.training.generate import plain
from stoker.training.generate.cached import (
    Blocks,
    Cache,
    Prompts,
    Weights,
    as_mask,
    distinct,
    kernels_for,
    padded,
    seen,
)
from stoker.training.generate.config import Sampling, checked
from stoker.training.generate.graphed import Graphed
from stoker.training.generate.sample import sample_token, token_logprobs, uniforms
from stoker.training.model.decoder import Decoder

PREFILL_TOKENS = 1 << 13  # at once: the feed-forward layer's activations stay below 1 GB for widths up to 32 K


class Eager:
    def __init__(self, w: Weights, rows: int, length: int, logprobs: bool = False) -> None:
        self._weights, self._blocks, self._keeps = w, Blocks(w, plain), logprobs
        self.logprobs = torch.empty(0)  # of the last batch: [rows, new tokens]
        self._angles = self._blocks.angles(lambda table: table[:length])
        self.cache = Cache(w, rows, length)
        self.prompt_tokens = 0

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
        slots = torch.arange(self.cache.length)
        holes = int(lengths.min()) < longest
        ahead = as_mask(seen(slots, lengths, longest, self.cache.length), dtype) if holes else None
        different, of = distinct(prompts)
        self.prompt_tokens += sum(map(len, different))
        different_lengths = torch.tensor([len(prompt) for prompt in different])
        ids = padded(different, longest)
        logits = blocks.prefill(ids, different_lengths, self._angles, self.cache.kv, PREFILL_TOKENS)
        if len(different) < len(prompts):
            self.cache.spread(of, longest)
            logits = logits[of]
        written = torch.zeros(len(prompts), new_tokens, dtype=torch.int64)
        self.logprobs = torch.zeros(len(prompts), new_tokens) if self._keeps else torch.empty(0)
        rows = torch.arange(len(prompts))
        alive = torch.ones(len(prompts), dtype=torch.bool)
        for place in range(new_tokens):
            token = sample_token(logits, noise[place, rows], how)
            written[rows, place] = token
            if self._keeps:
                self.logprobs[rows, place] = token_logprobs(logits, token, how.temperature)
            yield written[:, : place + 1]
            alive &= ~stop[token]
            left = int(alive.sum())
            if left == 0 or place + 1 == new_tokens:
                return
            if 2 * left <= len(alive):
                kept = alive.nonzero()[:, 0]
                self.cache.keep(kept, longest + place)
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

            cached = self.cache.kv[:, :, : len(rows)]
            x, delta = blocks.run(token, lengths + place, self._angles, cached, slot, 1, attention)
            logits = blocks.logits(x, delta)


class Engine:
    def __init__(
        self, model: Decoder, *, rows: int, length: int, vocab: int = 0, codes: bool = False,
        logprobs: bool = False, streamed: bool = False,
    ) -> None:  # fmt: skip
        """`rows`: answers at once; `length`: prompt and answer; `vocab`: ids from here on are never written; `codes`: weights
        in 4 bits stay so, instead of a copy in 16; `logprobs`: `generate` leaves those of its tokens in `logprobs`; `streamed`: of a model in shards no
        rank holds all weights: all ranks write the same answers, and gather each block for each token.
        """
        if rows < 1 or length < 2:
            raise Refusal(f"generation with {rows} rows of {length} tokens can't be: at least 1 row of 2", EX_USAGE)
        if length > model.context_length:
            raise Refusal(
                f"generation of {length} tokens (prompt and answer): the model was opened for {model.context_length}"
                " (data.context_length)",
                EX_USAGE,
            )
        self.rows, self.length = rows, length
        self._keeps_logprobs = logprobs
        self.logprobs: list[list[float]] = []  # of the last answers' tokens, where they are kept
        self._vocab, self._embedded = vocab or model.config.vocab_size, model.config.vocab_size
        self._device = next(model.parameters()).device
        self._runner: Any
        self._weights = Weights(model, self._vocab, codes, streamed)
        if self._device.type == "cuda" and not streamed:  # a graph can't hold gathers
            self._runner = Graphed(
                self._weights, rows, length, kernels_for(model.config, length, self._device), logprobs
            )
        else:
            self._runner = Eager(self._weights, rows, length, logprobs)

    @property
    def merged_bytes(self) -> int:
        """Of the copy that has adapters in it."""
        return self._weights.merged_bytes

    @property
    def prompt_tokens(self) -> int:
        """Of prompts, that were computed so far: equal prompts of a batch count once."""
        return int(self._runner.prompt_tokens)

    @property
    def copied_bytes(self) -> int:
        """Of all weights that are not the model's own."""
        return self._weights.copied_bytes

    @property
    def cache_bytes(self) -> int:
        """Of keys and values."""
        return int(self._runner.cache.kv.nbytes)

    def refresh(self) -> None:
        """The model's weights changed."""
        if not self._weights.refresh():
            self._runner.forget()

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        new_tokens: int,
        stop: Collection[int],
        seed: int = 0,
        indexes: Sequence[int] | None = None,
        told: Callable[[float], None] | None = None,
        **sampling: Any,
    ) -> list[list[int]]:
        """`sampling`: temperature, top_k, top_p, as of `sample.checked`. Ids of each answer; where it ended by itself, the last is the stop token. `indexes`: the prompts' numbers
        among all ranks', for the sampling. `told`: how many prompts are answered.
        """
        how = checked(**sampling)
        self._check(prompts, new_tokens)
        stops = self._stops(stop)
        if self._keeps_logprobs and (how.greedy or not how.plain):
            raise ValueError("log-probabilities are kept of plain sampling only: temperature above 0, top_k 0, top_p 1")
        answers: list[list[int]] = [[] for _ in prompts]
        self.logprobs = [[] for _ in prompts]
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))  # like lengths together: short holes
        for begin in range(0, len(order), self.rows):
            some = order[begin : begin + self.rows]
            numbers = some if indexes is None else [indexes[index] for index in some]
            steps = self._runner.run([prompts[index] for index in some], numbers, new_tokens, stops, how, seed)
            written = torch.empty(0)
            for made, written in enumerate(steps, 1):  # noqa: B007  the last one has all
                if told is not None:
                    told(begin + len(some) * made / new_tokens)
            kept = self._runner.logprobs[: len(some)].tolist() if self._keeps_logprobs else [[]] * len(some)
            for index, answer, logprobs in zip(some, written.tolist(), kept, strict=True):
                ended = next((place + 1 for place, token in enumerate(answer) if token in stop), None)
                answers[index] = answer[:ended]
                self.logprobs[index] = logprobs[: len(answers[index])]
        return answers

    def stream(
        self, prompt: Sequence[int], *, new_tokens: int, stop: Collection[int], seed: int = 0, **sampling: Any
    ) -> Iterator[int]:
        """One answer, token by token; the same as `generate`'s for a single prompt."""
        how = checked(**sampling)
        self._check([prompt], new_tokens)
        with torch.inference_mode():
            steps = self._runner.run([prompt], [0], new_tokens, self._stops(stop), how, seed)
        while True:
            with torch.inference_mode():  # not across the yield: the caller's own work is none of ours
                written = next(steps, None)
            if written is None:
                return
            token = int(written[0, -1])
            yield token
            if token in stop:
                return

    def _check(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
        if new_tokens < 1:
            raise Refusal(f"new_tokens {new_tokens}: at least 1", EX_USAGE)
        for index, prompt in enumerate(prompts):
            if not prompt:
                raise Refusal(f"prompt {index} is empty: an answer needs a token to follow", EX_USAGE)
            if len(prompt) + new_tokens > self.length:
                line = (
                    f"prompt {index} has {len(prompt)} tokens, with {new_tokens} of an answer more than the"
                    f" {self.length} there is room for"
                )
                raise Refusal(line + ": fewer generate.new_tokens, or a larger data.context_length", EX_USAGE)
            if max(prompt) >= self._embedded or min(prompt) < 0:
                raise Refusal(
                    f"prompt {index} has the id {max(prompt)}, the model {self._embedded} rows: another tokenizer's?",
                    EX_USAGE,
                )

    def _stops(self, stop: Collection[int]) -> Tensor:
        """[vocabulary]: which ids end an answer."""
        table = torch.zeros(self._vocab, dtype=torch.bool)
        table[[one for one in stop if 0 <= one < self._vocab]] = True
        return table.to(self._device)
