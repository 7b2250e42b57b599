"""Answers of a decoder, a batch at a time.

    engine = Engine(model, rows=64, length=512)
    answers = engine.generate(prompts, new_tokens=128, stop={end}, temperature=1.0, seed=7)
    …                                          # a training step
    engine.refresh()

An answer depends on the seed and on the prompt's index, not on the batch it was written in, up to the rounding of products of another size.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from stoker.contract.names import EX_USAGE, Refusal
from stoker.contract.shape import replace
from stoker.training.generate.borrowed import Borrowed
from stoker.training.generate.cached import Weights
from stoker.training.generate.eager import Eager
from stoker.training.generate.graphed import Graphed
from stoker.training.generate.sample import checked
from stoker.training.model.config import lacking
from stoker.training.model.decoder import Decoder
from stoker.training.model.outside import Outside

# Options of the block that the Triton kernels compute, or that lie beside them.
KERNELS = (
    "qkv_bias", "out_bias", "mlp_bias", "norm_offset", "activation", "gated", "attention_scale", "embedding_scale", "final_cap", "rope_kind", "unrotated",
    "window_theta", "positions", "experts",
)  # fmt: skip


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Engine:
    def __init__(
        self,
        model: Decoder | Outside,
        *,
        rows: int,
        length: int,
        vocab: int = 0,
        say: Callable[[str], None] = _to_stderr,
    ) -> None:
        """`rows`: answers at once; `length`: of a prompt and its answer; `vocab`: ids from here on are never written
        (0: the embedding's rows).
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
        self._vocab, self._embedded = vocab or model.config.vocab_size, model.config.vocab_size
        self._device = next(model.parameters()).device
        self._runner: Any
        if isinstance(model, Outside):
            self._weights: Weights | None = None
            self._runner = Borrowed(model, self._vocab)
            return
        self._weights = Weights(model, self._vocab)
        self._runner = Eager(self._weights, rows, length)
        if self._device.type == "cuda":
            self._runner = Graphed(self._weights, rows, length, self._kernels(model, say))

    def _kernels(self, model: Decoder, say: Callable[[str], None]) -> Any:
        c = model.config
        if all(not window or window >= self.length for window in c.windows):
            c = replace(c, windows=())  # none is ever left
        head_dim, lacks = c.head_dim, lacking(c, KERNELS)
        if head_dim < 16 or head_dim & (head_dim - 1):
            lacks = f"heads of {head_dim}"
        if lacks:
            say(f"the generation kernels have no {lacks} yet; using plain torch")
            return None
        return import_module("stoker.training.generate.kernel")  # Triton: on GPUs only

    def refresh(self) -> None:
        """The model's weights changed."""
        if self._weights is not None and not self._weights.refresh():
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
        **sampling: Any,
    ) -> list[list[int]]:
        """`sampling`: temperature, top_k, top_p, as of `sample.checked`. Ids of each answer; where it ended by itself, the last is the stop token. `indexes`: the prompts' numbers
        among all ranks', for the sampling.
        """
        how = checked(**sampling)
        self._check(prompts, new_tokens)
        stops = self._stops(stop)
        answers: list[list[int]] = [[] for _ in prompts]
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))  # like lengths together: short holes
        for begin in range(0, len(order), self.rows):
            some = order[begin : begin + self.rows]
            numbers = some if indexes is None else [indexes[index] for index in some]
            steps = self._runner.run([prompts[index] for index in some], numbers, new_tokens, stops, how, seed)
            (written,) = deque(steps, maxlen=1)
            for index, answer in zip(some, written.tolist(), strict=True):
                answers[index] = _cut(answer, stop)
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


def _cut(answer: list[int], stop: Collection[int]) -> list[int]:
    for place, token in enumerate(answer):
        if token in stop:
            return answer[: place + 1]
    return answer
