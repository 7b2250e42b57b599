"""Answers to requests that come and go, one step at a time.

    engine = PagedEngine(model, Sizes(slots=64, length=4096, memory=65536))
    engine.add(Request("a", prompt, new_tokens=128, stop=frozenset({end})))
    while engine.busy:
        for event in engine.step():
            …

An answer depends on its request alone: not on what else runs, when it arrived, or whether its tokens had to be computed
twice; up to the rounding of products of another size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NamedTuple

import numpy as np
import torch

from stoker.contract.errors import EX_USAGE, Refusal
from stoker.contract.frozen import frozen
from stoker.contract.units import plural
from stoker.training.generate.cached import Weights, kernels_for
from stoker.training.generate.sample import uniforms
from stoker.training.model.decoder import Decoder
from stoker.training.serve.blocks import Pool
from stoker.training.serve.paged import (
    FILTERED,
    GREEDY,
    NO_LOGPROBS,
    OF_ALTERNATIVES,
    OF_TOKENS,
    PLAIN,
    Kernels,
    Kind,
    Paged,
    Part,
    Row,
    Written,
)
from stoker.training.serve.request import (
    ABORTED,
    FINISH,
    LENGTH,
    MOST_ALTERNATIVES,
    STOP,
    Answer,
    Event,
    LogitAdjustments,
    PromptLogprob,
    Request,
    Run,
    answer_of,
)
from stoker.training.serve.schedule import Schedule, Writing
from stoker.training.serve.text import Text


class _Open:
    """A request that is not answered yet."""

    def __init__(self, request: Request, writing: Writing, text: Text | None, turn: int) -> None:
        self.request, self.writing, self.text = request, writing, text
        self.is_fed = False  # its slot has its last token
        scored = len(request.prompt) - 1 if request.prompt_logprobs >= 0 else 0
        self.prompt = [PromptLogprob(float("nan"), 0)] * scored
        count = 0 if request.sampling.greedy else request.new_tokens
        drawn = uniforms(request.seed, [request.index], count)[:, 0]
        self._turn, self._uniforms = turn, np.concatenate([drawn, np.zeros(turn, dtype=np.float32)])

    @property
    def written(self) -> int:
        return len(self.writing.tokens) - self.writing.prompt

    def following(self, begin: int, end: int) -> Sequence[int]:
        """Of the prompt's tokens, those behind the ones from `begin` to `end`, where they are to be told."""
        return self.request.prompt[begin + 1 : end + 1] if self.request.prompt_logprobs >= 0 else ()

    def row(self, end: int) -> Row:
        how, writing = self.request.sampling, self.writing
        assert writing.table is not None
        first = 0 if how.greedy else self.written
        drawn = self._uniforms[first : first + self._turn]
        # Steps behind the answer's end, which others' rows need, write to the place of its last token, which nobody reads: the
        # one before may end a block that others read.
        last = writing.longest - 1
        return Row(writing.slot, writing.table.blocks, end - 1, last, drawn, how.temperature, how.top_k, how.top_p)


@frozen
class Sizes:
    slots: int  # answers at once
    length: int  # tokens of a prompt and its answer
    memory: int  # tokens whose keys and values are kept, of all answers together
    block: int = 16  # tokens that are kept, shared and given back together
    prompt_tokens: int = 2048  # of prompts, computed in one step beside a token of each answer
    turn: int = 1  # tokens of each answer, at most, that are written before the host looks at them
    turns: int = 1  # such turns at once, at most, where no request waits for a slot: they end together


_NUMBERS_AT_ONCE = 1 << 28  # of a prompt within a layer, on a CPU: 1 GB


class _Change(NamedTuple):
    apply: Callable[[], None]
    version: int | None
    digest: str
    applied: Callable[[int], None]


class PagedEngine:
    def __init__(
        self,
        model: Decoder,
        sizes: Sizes,
        *,
        vocab: int = 0,
        codes: bool = False,
        text_of: Callable[[Request], Text] | None = None,
        digest: str = "",
        streamed: bool = False,
    ) -> None:
        """`vocab`: ids from here on are never written; `codes`: weights in 4 bits stay so; `text_of`: what reads a
        request's answer. Without it events have no text. `digest`: of the weights, which events have, too. `streamed`: of a
        model in shards, whose blocks all ranks gather for each step: they ask the same, and their steps are the same.
        """
        slots, length, memory = sizes.slots, sizes.length, sizes.memory
        if slots < 1 or length < 2 or memory < length:
            line = f"{slots} answers of {length} tokens at once with memory for {memory} tokens are not possible"
            raise Refusal(f"{line}: at least 1 answer of 2 tokens, and memory for one of full length", EX_USAGE)
        if length > model.context_length:
            line = f"prompt and answer of {length} tokens are too long: the model was opened for {model.context_length}"
            raise Refusal(line, EX_USAGE)
        self.length, self._embedded, self._text_of = length, model.config.vocab_size, text_of
        self.weights = Weights(model, vocab or model.config.vocab_size, codes, streamed)
        self.pool = Pool(-(-memory // sizes.block), sizes.block)
        at_once = sizes.prompt_tokens
        if model.device.type == "cpu":
            c = model.config
            scores = c.heads * length if c.attention_cap else 0  # which no kernel of torch keeps from being stored
            at_once = max(1, min(at_once, _NUMBERS_AT_ONCE // max(c.ff, c.heads * c.head_dim, scores)))
        self.schedule = Schedule(slots, self.pool, at_once)
        self._paged = Paged(
            self.weights, slots, length, self.pool, _kernels(model, length), captures=not streamed, turn=sizes.turn,
            turns=sizes.turns,
        )  # fmt: skip
        self._turn, self._at_once = sizes.turn, sizes.turn * sizes.turns
        self._open: dict[str, _Open] = {}
        self._of: dict[Writing, _Open] = {}
        self._ended: list[Run] = []
        self._changes: list[_Change] = []
        self._adjusted = self._constrained = 0  # open requests whose logits change, and those with a constraint
        self.version, self.digest = 0, digest

    @property
    def count(self) -> int:
        """Requests that are not answered yet."""
        return len(self._open)

    @property
    def cache_bytes(self) -> int:
        """Of keys and values."""
        return self._paged.cache.kv.nbytes

    @property
    def busy(self) -> bool:
        return bool(self._open or self._ended or self._changes)

    def add(self, request: Request) -> None:
        """Refused where it can't be answered."""
        self._check(request)
        writing = self.schedule.add(request.prompt, request.prompt_logprobs >= 0, request.new_tokens)
        text = None if self._text_of is None else self._text_of(request)
        self._adjusted += request.changes_logits
        self._constrained += request.constraint is not None
        self._open[request.id] = self._of[writing] = _Open(request, writing, text, self._at_once)

    def abort(self, name: str) -> bool:
        """Its last event comes with the next step. False: there is no such request, or it is answered."""
        asked = self._open.get(name)
        if asked is None:
            return False
        self._close(asked)
        self._ended.append(Run(name, (), self.version, self.digest, ABORTED))
        return True

    def update(
        self,
        change: Callable[[], None],
        version: int | None = None,
        digest: str = "",
        applied: Callable[[int], None] = lambda version: None,
    ) -> None:
        """`change` gives the model new weights. It is called before a step, once no answer is open that is to be finished with
        those of before; until then nothing new begins. `version`: what they are called from then on; None: one more than
        before. `applied` is called with it when that is so.
        """
        self._changes.append(_Change(change, version, digest, applied))

    def step(self) -> list[Event]:
        """A token of every running answer, or a turn of them, and as much of new prompts as fits in."""
        return [event for run in self.turn() for event in run.events()]

    @torch.inference_mode()
    def turn(self) -> list[Run]:
        """The same, all tokens of an answer together."""
        runs, self._ended = self._ended, []
        if self._changes and not any(map(self._finishes, self._of.values())):
            self._change()
        closing = bool(self._changes)
        plain = self._text_of is None and all(one.request.logprobs <= 0 for one in self._open.values())
        alone = self._at_once if plain and not closing and not self._constrained else 0
        most = 1 if self._constrained else self._turn  # the host must see each token before the next one is sampled
        plan = self.schedule.plan(lambda writing: not closing or self._finishes(self._of[writing]), most, alone)
        for writing in plan.left_out:
            self._of[writing].is_fed = False
        self._paged.copy(plan.copies)
        parts = [
            Part(
                self._of[piece.writing].row(piece.end),
                piece.writing.tokens[piece.begin : piece.end],
                piece.is_last,
                self._of[piece.writing].following(piece.begin, piece.end),
                max(self._of[piece.writing].request.prompt_logprobs, 0),
            )
            for piece in plan.pieces
        ]
        prompted = [self._of[piece.writing] for piece in plan.pieces if piece.is_last]
        stepped = [self._of[writing] for writing in plan.rows]
        written: list[tuple[_Open, Written, int]] = []
        if parts:
            self._load_adjustments(prompted)
            made = self._paged.prompts(parts, _kind(prompted, self._adjusts(prompted)))
            for piece, values in zip(plan.pieces, made.following, strict=True):
                self._of[piece.writing].prompt[piece.begin : piece.begin + len(values)] = values
            written += [(asked, made, place) for place, asked in enumerate(prompted)]
        if stepped:
            for asked in stepped:
                if not asked.is_fed:
                    self._paged.start(asked.writing.slot, asked.writing.tokens[-1])
            self._load_adjustments(stepped)
            rows = [asked.row(len(asked.writing.tokens)) for asked in stepped]
            made = self._paged.step(rows, _kind(stepped, self._adjusts(stepped)), plan.count, _Ended(stepped))
            written += [(asked, made, place) for place, asked in enumerate(stepped)]
        self.schedule.computed(plan)
        return runs + [self._run(*one) for one in written]

    def _adjusts(self, rows: Sequence[_Open]) -> bool:
        return self._adjusted > 0 and any(row.request.changes_logits for row in rows)

    def _load_adjustments(self, rows: Sequence[_Open]) -> None:
        for row in rows if self._adjusts(rows) else ():
            request, slot, generated = row.request, row.writing.slot, row.writing.tokens[row.writing.prompt :]
            adjustments = request.adjustments or (LogitAdjustments() if request.constraint is not None else None)
            self._paged.adjuster.load(slot, row, adjustments, request.prompt, generated)
            if request.constraint is not None:
                self._paged.adjuster.allow(slot, request.constraint.allowed())

    def _finishes(self, asked: _Open) -> bool:
        return asked.request.on_update == FINISH and asked.writing.begun

    def _change(self) -> None:
        """All tokens so far are computed again: every token is written by one version's weights alone."""
        changes, self._changes = self._changes, []
        versions: list[int] = []
        for change in changes:
            change.apply()
            self.version = self.version + 1 if change.version is None else change.version
            self.digest = change.digest
            versions.append(self.version)
        self.refresh()
        for change, version in zip(changes, versions, strict=True):
            change.applied(version)

    def refresh(self) -> None:
        """The model's weights have changed: from now on they write. All ranks of a model in shards call it together."""
        if not self.weights.refresh():
            self._paged.forget()
        self._paged.clear()
        self.schedule.restart(str(self.version))
        for asked in self._of.values():
            asked.is_fed = False

    def _run(self, asked: _Open, made: Written, place: int) -> Run:
        """What of a row's tokens belongs to its answer."""
        request, tokens, before = asked.request, made.tokens[place], asked.written
        tokens, finish, texts = _until_end(tokens[: request.new_tokens - before], asked)
        if request.constraint is not None:
            for token in tokens:
                request.constraint.accept(token)
            if request.constraint.has_failed:
                finish = LENGTH  # what is there is a beginning, as where max_tokens cuts it off
            elif request.constraint.is_complete:
                finish = STOP
        asked.writing.tokens += tokens
        asked.is_fed = True
        if not finish and asked.written == request.new_tokens:
            finish = LENGTH
        if finish:
            if asked.text is not None:
                texts[-1] += asked.text.rest()
            self._close(asked)
        elif len(tokens) > 1:
            self.schedule.followed(asked.writing)
        count, most = len(tokens), request.logprobs
        logprobs = made.logprobs[place][:count] if most >= 0 else ()
        others = [tuple(some[:most]) for some in made.alternatives[place][:count]] if most > 0 else ()
        prompt = () if before else tuple(asked.prompt)
        return Run(request.id, tokens, self.version, self.digest, finish, texts, logprobs, others, prompt)

    def _close(self, asked: _Open) -> None:
        self.schedule.end(asked.writing)
        self._adjusted -= asked.request.changes_logits
        self._constrained -= asked.request.constraint is not None
        del self._open[asked.request.id], self._of[asked.writing]

    def _check(self, request: Request) -> None:
        prompt, new_tokens = request.prompt, request.new_tokens
        if request.id in self._open:
            raise Refusal(
                f"request {request.id!r} is already being answered: give each request an id of its own", EX_USAGE
            )
        if new_tokens < 1 or not prompt:
            raise Refusal(f"a prompt of {len(prompt)} tokens with {new_tokens} new ones: at least 1 of each", EX_USAGE)
        if len(prompt) + new_tokens > self.length:
            line = f"the prompt has {plural(len(prompt), 'token')}; with an answer of {new_tokens} that is more"
            raise Refusal(f"{line} than the limit of {self.length}", EX_USAGE)
        if max(prompt) >= self._embedded or min(prompt) < 0:
            line = f"the prompt has the token id {max(prompt) if min(prompt) >= 0 else min(prompt)}"
            raise Refusal(f"{line}, and the model has {self._embedded}: another tokenizer's?", EX_USAGE)
        if request.stop_texts and self._text_of is None:
            raise Refusal("stop texts need a tokenizer; this engine was given none", EX_USAGE)
        alternatives = max(request.logprobs, request.prompt_logprobs)
        if min(request.logprobs, request.prompt_logprobs) < -1 or alternatives > MOST_ALTERNATIVES:
            line = f"log-probabilities of {alternatives} tokens per position: at most {MOST_ALTERNATIVES}"
            raise Refusal(line, EX_USAGE)


class _Ended:
    """Whether all of them have ended, by the tokens that follow."""

    def __init__(self, asked: Sequence[_Open]) -> None:
        self._stops = [one.request.stop for one in asked]
        self._left = [one.request.new_tokens - one.written for one in asked]

    def __call__(self, tokens: list[list[int]]) -> bool:
        for place, (some, stop) in enumerate(zip(tokens, self._stops, strict=True)):
            self._left[place] = self._left[place] - len(some) if stop.isdisjoint(some) else 0
        return max(self._left) <= 0


def _until_end(tokens: list[int], asked: _Open) -> tuple[list[int], str, list[str]]:
    """(those up to the first that ends the answer, why it ended, their texts)."""
    stop, text = asked.request.stop, asked.text
    if text is None:
        if stop.isdisjoint(tokens):
            return tokens, "", []
        end = next(place for place, token in enumerate(tokens) if token in stop)
        return tokens[: end + 1], STOP, []
    texts: list[str] = []
    for place, token in enumerate(tokens):
        is_stop = token in stop
        texts.append("" if is_stop else text.feed(token))
        if is_stop or text.stopped:
            return tokens[: place + 1], STOP, texts
    return tokens, "", texts


def _kernels(model: Decoder, length: int) -> Kernels | None:
    between = kernels_for(model.config, length, model.device)
    return Kernels(between, import_module("stoker.training.serve.kernel")) if between else None


def _kind(asked: Sequence[_Open], adjusts: bool) -> Kind:
    """The least that gives all of them what they want."""
    hows = [one.request.sampling for one in asked]
    sampling = GREEDY if all(how.greedy for how in hows) else PLAIN
    if any(not how.greedy and not how.plain for how in hows):
        sampling = FILTERED
    most = max((one.request.logprobs for one in asked), default=-1)
    logprobs = NO_LOGPROBS if most < 0 else OF_TOKENS
    return Kind(sampling, OF_ALTERNATIVES if most > 0 else logprobs, adjusts)


def answers(engine: PagedEngine, requests: Sequence[Request]) -> list[Answer]:
    """To all of them, in their order."""
    events: dict[str, list[Event]] = {}
    for request in requests:
        engine.add(request)
        events[request.id] = []
    while any(not listed or not listed[-1].finish for listed in events.values()):
        for event in engine.step():
            if event.id in events:
                events[event.id].append(event)
    return [answer_of(events[request.id]) for request in requests]
