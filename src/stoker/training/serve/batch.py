"""Answers to lists of prompts that are all there at once: GRPO's, evaluation's, a conversation's next turn.

    engine = BatchEngine(model, rows=64, length=512)
    answers = engine.generate(prompts, new_tokens=128, stop={end}, temperature=1.0, seed=7)
    …                                          # a training step
    engine.refresh()

They are requests to a paged engine of this process's own; a module that transformers computes writes over its own cache. An
answer depends on the seed and on the prompt's index, not on what else is written, up to the rounding of products of another size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from stoker.contract.errors import EX_USAGE, Refusal
from stoker.contract.frozen import replace
from stoker.contract.units import plural
from stoker.training.generate.config import BLOCK, PREFILL_TOKENS, TURN, Sampling, checked
from stoker.training.generate.sample import sample_token, uniforms
from stoker.training.model.decoder import Decoder
from stoker.training.model.outside import Outside
from stoker.training.serve.engine import PagedEngine, Sizes
from stoker.training.serve.request import LENGTH, STOP, Answer, Request, Run
from stoker.training.serve.text import Text


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


PREFILL_TOKENS_ON_CPU = 1 << 13  # at once: the feed-forward layer's activations stay below 1 GB for widths up to 32 K
TURNS = 8  # at once on a GPU: what the host does for each answer between them takes as long as three tokens
TURN_ALONE = 4  # tokens: somebody reads along, and for one answer the host has little to do
Prompts = Sequence[Sequence[int]]
Tokens = tuple[int, Sequence[int], Sequence[float]]  # which prompt, its next tokens, their log-probabilities


def sizes_for(rows: int, length: int, prompt_tokens: int, turn: int, turns: int = 1) -> Sizes:
    """A block more for each row than its tokens need, so that nobody ever gives way."""
    memory = rows * (-(-length // BLOCK) + 1) * BLOCK
    return Sizes(rows, length, memory, BLOCK, prompt_tokens, turn, turns)


def _joined(runs: Sequence[Run]) -> Answer:
    tokens = tuple(token for run in runs for token in run.tokens)
    logprobs = tuple(value for run in runs for value in run.logprobs)
    return Answer(runs[-1].id, tokens, "", runs[-1].finish, (), logprobs)


class BatchEngine:
    """One call at a time."""

    def __init__(
        self, model: Decoder | Outside, *, rows: int, length: int, vocab: int = 0, codes: bool = False,
        logprobs: bool = False, streamed: bool = False, text_of: Callable[[Request], Text] | None = None,
    ) -> None:  # fmt: skip
        """`rows`: answers at once; `length`: prompt and answer; `vocab`: ids from here on are never written; `codes`: weights
        in 4 bits stay so, instead of a copy in 16; `logprobs`: `generate` leaves those of its tokens in `logprobs`; `streamed`:
        of a model in shards no rank holds all weights: all ranks write the same answers, and gather each block for each token; `text_of`: reads an answer, for
        stop texts.
        """
        if rows < 1 or length < 2:
            raise Refusal(
                f"generation with {rows} rows of {length} tokens is not possible: at least 1 row of 2", EX_USAGE
            )
        if length > model.context_length:
            line = f"prompt and answer of {length} tokens are too long: the model was opened for {model.context_length}"
            raise Refusal(f"{line} (data.context_length)", EX_USAGE)
        self.rows, self.length, self.keeps_logprobs = rows, length, logprobs
        self.logprobs: list[list[float]] = []  # of the last answers' tokens, where they are kept
        self._embedded, vocab = model.config.vocab_size, vocab or model.config.vocab_size
        self._names = count()
        self._borrowed: Borrowed | None = None
        self._paged: PagedEngine | None = None
        if isinstance(model, Outside):
            self._borrowed = Borrowed(model, vocab, rows)
        else:
            # A CPU launches nothing, and a token that nobody wants costs it as much as any other.
            on_gpu = model.device.type == "cuda"
            at_once, turn = (PREFILL_TOKENS, TURN) if on_gpu else (PREFILL_TOKENS_ON_CPU, 1)
            alone = rows == 1
            turn, turns = min(turn, TURN_ALONE) if alone else turn, TURNS if on_gpu and not alone else 1
            sizes = sizes_for(rows, length, at_once, turn, turns)
            self._paged = PagedEngine(model, sizes, vocab=vocab, codes=codes, streamed=streamed, text_of=text_of)

    @property
    def merged_bytes(self) -> int:
        """Of the copy that has adapters in it."""
        return 0 if self._paged is None else self._paged.weights.merged_bytes

    @property
    def copied_bytes(self) -> int:
        """Of all weights that are not the model's own."""
        return 0 if self._paged is None else self._paged.weights.copied_bytes

    @property
    def cache_bytes(self) -> int:
        """Of keys and values."""
        return 0 if self._paged is None else self._paged.cache_bytes

    @property
    def prompt_tokens(self) -> int:
        """Of prompts, that were computed so far: of equal ones, all tokens once and the last one for each."""
        if self._borrowed is not None:
            return self._borrowed.prompt_tokens
        assert self._paged is not None
        return self._paged.schedule.prompt_tokens

    def refresh(self) -> None:
        """The model's weights changed. All ranks of a model in shards call it together."""
        if self._paged is not None:
            self._paged.refresh()

    def generate(
        self,
        prompts: Prompts,
        *,
        new_tokens: int,
        stop: Collection[int],
        seed: int = 0,
        indexes: Sequence[int] | None = None,
        told: Callable[[float], None] | None = None,
        **sampling: Any,
    ) -> list[list[int]]:
        """`sampling`: temperature, top_k, top_p, as of `checked`. Ids of each answer; where it ended by itself, the last is the stop token. `indexes`: the prompts' numbers
        among all ranks', for the sampling. `told`: how many prompts are answered.
        """
        how = checked(**sampling)
        if self.keeps_logprobs and (how.greedy or not how.plain):
            raise ValueError("log-probabilities are kept of plain sampling only: temperature above 0, top_k 0, top_p 1")
        written: list[list[int]] = [[] for _ in prompts]
        self.logprobs = [[] for _ in prompts]
        done = 0.0
        numbers = range(len(prompts)) if indexes is None else indexes
        for number, tokens, logprobs in self._tokens(prompts, numbers, new_tokens, frozenset(stop), how, seed):
            written[number] += tokens
            self.logprobs[number] += logprobs
            if told is not None:
                done += (len(tokens) + (new_tokens - len(written[number])) * (tokens[-1] in stop)) / new_tokens
                told(min(done, len(prompts)))
        return written

    def complete(self, requests: Sequence[Request]) -> list[Answer]:
        """Answer requests that differ in length, seed and stop texts, in one batch.

        An answer does not depend on the other requests, as in `generate`.
        """
        if self._borrowed is not None:
            return [self._alone(request) for request in requests]
        assert self._paged is not None and not self._paged.count, "one call at a time"
        names = [str(next(self._names)) for _ in requests]
        runs: dict[str, list[Run]] = {name: [] for name in names}
        try:
            for name, request in zip(names, requests, strict=True):
                self._paged.add(replace(request, id=name))
            while any(not some or not some[-1].finish for some in runs.values()):
                for run in self._paged.turn():
                    if run.id in runs:
                        runs[run.id].append(run)
        finally:
            for name in names:
                self._paged.abort(name)
        return [_joined(runs[name]) for name in names]

    def _alone(self, request: Request) -> Answer:
        (ids,) = self.generate(
            [request.prompt], new_tokens=request.new_tokens, stop=request.stop, seed=request.seed, indexes=[request.index],
            **vars(request.sampling),
        )  # fmt: skip
        return Answer(request.id, tuple(ids), "", STOP if ids[-1] in request.stop else LENGTH, ())

    def stream(
        self, prompt: Sequence[int], *, new_tokens: int, stop: Collection[int], seed: int = 0, **sampling: Any
    ) -> Iterator[int]:
        """One answer, token by token; the same as `generate`'s for a single prompt."""
        for _, tokens, _ in self._tokens([prompt], [0], new_tokens, frozenset(stop), checked(**sampling), seed):
            yield from tokens

    def _tokens(
        self, prompts: Prompts, indexes: Sequence[int], new_tokens: int, stop: frozenset[int], how: Sampling, seed: int
    ) -> Iterator[Tokens]:
        self._check(prompts, new_tokens)
        if self._borrowed is not None:
            ended: set[int] = set()
            for number, token in self._borrowed.tokens(prompts, indexes, new_tokens, stop, how, seed):
                if number not in ended:
                    yield number, [token], ()
                if token in stop:
                    ended.add(number)
            return
        assert self._paged is not None and not self._paged.count, "one call at a time"
        asked: dict[str, int] = {}
        try:
            for number, (prompt, index) in enumerate(zip(prompts, indexes, strict=True)):
                name, kept = str(next(self._names)), 0 if self.keeps_logprobs else -1
                self._paged.add(Request(name, tuple(prompt), new_tokens, how, seed, index, stop, logprobs=kept))
                asked[name] = number
            while asked:
                for run in self._paged.turn():
                    if not run.tokens:  # of a call before, that was given up
                        continue
                    number = asked.pop(run.id) if run.finish else asked[run.id]
                    yield number, run.tokens, run.logprobs
        finally:
            for name in asked:
                self._paged.abort(name)

    def _check(self, prompts: Prompts, new_tokens: int) -> None:
        if new_tokens < 1:
            raise Refusal(f"new_tokens {new_tokens} is too small: at least 1", EX_USAGE)
        for index, prompt in enumerate(prompts):
            if not prompt:
                raise Refusal(f"prompt {index} is empty: an answer needs a token to follow", EX_USAGE)
            if len(prompt) + new_tokens > self.length:
                line = f"prompt {index} has {plural(len(prompt), 'token')}; with an answer of {new_tokens} that is more than"
                line += f" the limit of {self.length}"
                raise Refusal(f"{line}: lower generate.new_tokens, or raise data.context_length", EX_USAGE)
            if max(prompt) >= self._embedded or min(prompt) < 0:
                line = f"prompt {index} has the token id {max(prompt)}, and the model has {self._embedded}: another tokenizer's?"
                raise Refusal(line, EX_USAGE)
