"""Does a server that writes the answers have the trainers' weights? It and the trainer say how likely each token of a test
prompt is; the same weights say the same, but for rounding.

    check = WeightsCheck(address, model, ids)
    wrong = check(own_logprobs(decoder, ids))     # every few steps, on one rank; a line: raise Stopped(wrong)

Of fixed tokens, not of a greedy answer: where two tokens are about as likely, rounding alone changes the answer. One update
at a small learning rate changes less than rounding does: what is seen is another model, or a server that has missed many.
The question is what OpenAI's completions, vLLM and sglang have in common: a prompt as token ids, with echo and logprobs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stoker.contract.text import escape
from stoker.training.rl.asking import Asking, NoAnswer

if TYPE_CHECKING:
    from stoker.training.model.decoder import Decoder

ANSWER_S = 60.0
AT_FIRST = 0.5  # a mean difference per token, in nats: at the start no rounding explains it
LEAST = 0.1  # afterwards, or
TIMES = 4.0  # so many times that of the start, whichever is more
IN_A_ROW = 2  # one check may come while it takes new weights


class Unanswered(Exception):
    """The server did not say how likely the tokens are: that is no word about its weights."""


def served_logprobs(
    address: str, model: str, ids: Sequence[int], seconds: float = ANSWER_S, key: str = ""
) -> list[float]:
    """How likely each token after the first is, as the server has it. `address`: HOST:PORT; `model`: empty: its only one."""
    asked = {"prompt": [*ids], "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
    asked |= {"model": model} if model else {}
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    body = json.dumps(asked).encode()
    try:
        status, data = Asking().post(address, "/v1/completions", body, headers, seconds=seconds)
    except NoAnswer as problem:
        raise Unanswered(f"{address}/v1/completions: {escape(str(problem), 200)}") from None
    if status != 200:
        said = escape(data[:200].decode("utf-8", "replace"), 200)
        raise Unanswered(f"{address}/v1/completions: HTTP status {status}: {said}")
    return _read(data, len(ids), address)


def _read(data: bytes, count: int, address: str) -> list[float]:
    try:
        told: Any = json.loads(data)["choices"][0]["logprobs"]["token_logprobs"][1:count]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        raise Unanswered(f"{address}/v1/completions: its answer has no token_logprobs (echo and logprobs)") from None
    good = isinstance(told, list) and len(told) == count - 1
    if not good or not all(type(one) in (int, float) and abs(one) <= sys.float_info.max for one in told):
        raise Unanswered(f"{address}/v1/completions: its token_logprobs don't match the {count} tokens it was sent")
    return [float(one) for one in told]


def own_logprobs(decoder: Decoder, ids: Sequence[int]) -> list[float]:
    """The same of the model that learns. With shards, on all ranks together."""
    import torch

    from stoker.training.model.loss import token_logprobs

    tokens = torch.tensor([list(ids)], dtype=torch.int64, device=decoder.device)
    with torch.no_grad():
        x = decoder.hidden(tokens[:, :-1]).flatten(0, 1)
        found, _ = token_logprobs(x, decoder.head_weight, tokens[0, 1:], 1.0, decoder.config.final_cap)
    return [float(one) for one in found.tolist()]


class WeightsCheck:
    """`ids`: the test prompt, the same in every check."""

    def __init__(self, address: str, model: str, ids: Sequence[int], key: str = "") -> None:
        if len(ids) < 2:
            raise ValueError("a test prompt has two tokens or more: nothing comes before the first")
        self._address, self._model, self._ids, self._key = address, model, tuple(ids), key
        self._floor: float | None = None  # the difference of the first check: both have what the run began with
        self._wrong = 0  # checks in a row

    def __call__(self, own: Sequence[float]) -> str:
        """`own`: this model's (own_logprobs). A line, once the server has other weights; empty: it has the same, or one more
        check must say so. Raises Unanswered.
        """
        served = served_logprobs(self._address, self._model, self._ids, key=self._key)
        apart = sum(abs(a - b) for a, b in zip(served, own, strict=True)) / len(served)
        if self._floor is None:
            self._floor = apart
            limit = AT_FIRST
        else:
            limit = max(LEAST, TIMES * self._floor)
        self._wrong = self._wrong + 1 if not apart <= limit else 0
        at_first = limit == AT_FIRST and self._wrong > 0
        if not at_first and self._wrong < IN_A_ROW:
            return ""
        since = "" if at_first else f" ({self._floor:.2f} at the start), at {self._wrong} checks in a row"
        line = f"the server at {self._address} answers with other weights than the trainers'"
        return (
            f"{line}: on a test prompt its log-probabilities differ by {apart:.2f} a token{since};"
            " does it serve the model that the trainers began with, and load what they publish?"
        )
