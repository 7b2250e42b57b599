"""Requests to the engine, and the events it answers them with. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from stoker.contract.frozen import frozen
from stoker.training.generate.config import Sampling

# What happens to an answer that is being written when the weights change.
FINISH = "finish"  # the change waits until it is written
CONTINUE = "continue"  # its next tokens are the new weights'; each token has its version
# Why an answer ended.
STOP, LENGTH, ABORTED = "stop", "length", "abort"
MOST_ALTERNATIVES = 20  # per token


@frozen
class LogitAdjustments:
    """Changes to a request's logits before a token is sampled, in this order. Each default changes nothing."""

    bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    repetition_penalty: float = (
        1.0  # of tokens of the prompt and the completion: divides logits above 0, multiplies others
    )
    frequency_penalty: float = 0.0  # subtracted once for each time the completion has the token
    presence_penalty: float = 0.0  # subtracted if the completion has the token
    min_p: float = 0.0  # drops tokens less likely than this share of the most likely token's probability


class Constraint(Protocol):
    """constrain.GrammarMatcher: where one completion is in its grammar. Each request needs one of its own."""

    @property
    def is_complete(self) -> bool: ...
    @property
    def has_failed(self) -> bool: ...
    def allowed(self) -> Any: ...  # NumPy's bool for each token id
    def accept(self, token: int) -> None: ...


@frozen
class Request:
    id: str
    prompt: tuple[int, ...]
    new_tokens: int
    sampling: Sampling = Sampling()
    seed: int = 0
    index: int = 0  # which of the answers to a prompt: another one samples otherwise
    stop: frozenset[int] = frozenset()  # ids that end the answer and are its last
    stop_texts: tuple[str, ...] = ()  # end it where they appear, and are not part of its text
    logprobs: int = -1  # -1: none; 0: of each token; more: of so many of the most likely ones, too
    on_update: str = FINISH
    # Log-probabilities of the prompt's tokens, too, with this many alternatives each; -1: none. All of the prompt is computed
    # then, also what another request's cache holds.
    prompt_logprobs: int = -1
    strips: bool = False  # a blank before the whole text is no part of it
    adjustments: LogitAdjustments | None = None  # None: the logits are sampled as they are
    skip_special_tokens: bool = True  # special tokens add nothing to the text
    visible: frozenset[int] = frozenset()  # special tokens that are part of the text all the same
    constraint: Constraint | None = None  # tokens that it does not allow are not sampled

    @property
    def changes_logits(self) -> bool:
        return self.adjustments is not None or self.constraint is not None


class PromptLogprob(NamedTuple):
    """The log-probability of one token of a prompt, its rank (1: the most likely), and the most likely tokens instead."""

    logprob: float
    rank: int
    alternatives: tuple[tuple[int, float], ...] = ()


class Event(NamedTuple):  # made for each token: a tenth of the time of a shape
    """A token of an answer. An abort has none."""

    id: str
    token: int | None
    version: int  # of the weights that wrote it
    text: str = ""  # what is now certain to be part of the answer
    logprob: float | None = None  # at the request's temperature (greedy: at 1), nothing left out
    alternatives: tuple[tuple[int, float], ...] = ()
    finish: str = ""  # why the answer ended; empty: it goes on
    digest: str = ""  # of those weights
    prompt: tuple[PromptLogprob, ...] = ()  # for the prompt's tokens after its first, with the completion's first token


class Run(NamedTuple):
    """Tokens of an answer that were written in a row. None: it was aborted."""

    id: str
    tokens: Sequence[int]
    version: int
    digest: str
    finish: str = ""
    texts: Sequence[str] = ()  # of each token, where the engine reads them
    logprobs: Sequence[float] = ()
    alternatives: Sequence[tuple[tuple[int, float], ...]] = ()
    prompt: tuple[PromptLogprob, ...] = ()

    def events(self) -> Iterator[Event]:
        if not self.tokens:
            yield Event(self.id, None, self.version, finish=self.finish, digest=self.digest)
        last = len(self.tokens) - 1
        for place, token in enumerate(self.tokens):
            yield Event(
                self.id,
                token,
                self.version,
                self.texts[place] if self.texts else "",
                self.logprobs[place] if self.logprobs else None,
                self.alternatives[place] if self.alternatives else (),
                self.finish if place == last else "",
                self.digest,
                self.prompt if place == 0 else (),
            )


@frozen
class Answer:
    id: str
    tokens: tuple[int, ...]
    text: str
    finish: str
    versions: tuple[int, ...]
    logprobs: tuple[float, ...] = ()


def answer_of(events: Iterable[Event]) -> Answer:
    """Of all events of a request, in their order."""
    listed = list(events)
    written = [event for event in listed if event.token is not None]
    return Answer(
        listed[-1].id,
        tuple(event.token for event in written if event.token is not None),
        "".join(event.text for event in listed),
        listed[-1].finish,
        tuple(event.version for event in written),
        tuple(event.logprob for event in written if event.logprob is not None),
    )
