"""OpenAI's completions and chat completions: a body becomes requests, and events become what its clients read. No torch.

Beside OpenAI's keys there are `return_token_ids`, `top_k`, `stop_token_ids`, `first_index` and `on_update` (finish, continue). A key that
nobody here reads is refused: an answer that silently ignores a setting is a wrong one.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stoker.contract.names import Refusal
from stoker.contract.quantities import counted
from stoker.contract.settings import suggest
from stoker.contract.shape import shape
from stoker.contract.untrusted import parse_json, printable
from stoker.training.generate.config import Sampling, checked
from stoker.training.serve.request import CONTINUE, FINISH, MOST_ALTERNATIVES, Event, Request
from stoker.training.tokenizer import chat
from stoker.training.tokenizer.tokenizer import Tokenizer

MOST_ANSWERS = 128  # of one body: prompts times n
MOST_STOPS, LONGEST_STOP = 16, 512
MOST_LOGPROBS = 1 << 18  # of one body's answers: in JSON 20 MB, while they are written 100 MB
# Of prompts that answers repeat, each for itself: bytes of text (in JSON six for one, twice with log-probabilities), and ids.
MOST_ECHOED, MOST_IDS = 4 << 20, 1 << 21
# Of what the answers to a body say, in bytes: in any case, and for each token that they may have. Tokens have 128 at most in published
# tokenizers; a stranger's have 1,024, each of them up to 21 times in a list of log-probabilities.
MOST_SAID, SAID_A_TOKEN = 4 << 20, 320
DEFAULT_TOKENS = 16  # of a completion, as OpenAI's; a chat's answer may fill the context
_BOTH = (
    "model", "stream", "stream_options", "n", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "max_tokens", "logprobs",
    "return_token_ids", "on_update", "first_index", "user",
)  # fmt: skip
_COMPLETION = (*_BOTH, "prompt", "echo")
_CHAT = (*_BOTH, "messages", "max_completion_tokens", "top_logprobs")
# What OpenAI has and we don't, with the values that change nothing.
_IDLE: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,), "frequency_penalty": (0,), "logit_bias": ({},), "echo": (False,), "best_of": (1,), "suffix": ("",), "tools": ([],),
    "tool_choice": ("none",), "response_format": ({"type": "text"},), "store": (False,), "metadata": ({},), "parallel_tool_calls": (True, False),
}  # fmt: skip


class Problem(Exception):
    """What the client did wrong, in one sentence."""

    def __init__(self, line: str, status: int = 400, key: str = "") -> None:
        super().__init__(line)
        self.line, self.status, self.key = line, status, key


@shape
class Served:
    """What the server has: the model's name, and the length of a prompt and its answer."""

    name: str
    tokenizer: Tokenizer
    length: int


@shape
class Asked:
    """A body: one request for each of its answers, in the order of their index."""

    id: str
    is_chat: bool
    created: int
    requests: tuple[Request, ...]
    stream: bool
    with_usage: bool
    with_ids: bool

    @property
    def prompt_tokens(self) -> int:
        """Of each prompt once."""
        first = self.requests[0].index
        return sum(len(request.prompt) for request in self.requests if request.index == first)


def read(body: bytes, is_chat: bool, served: Served) -> Asked:
    """Raises Problem."""
    told = _object(body, _CHAT if is_chat else _COMPLETION)
    if told.get("model") not in (None, served.name):
        raise Problem(f"no model {_shown(told['model'])} here; this server has {served.name}", 404, "model")
    prompts = [_conversation(told, served.tokenizer)] if is_chat else _prompts(told, served.tokenizer)
    count = _whole(told, "n", 1, 1, MOST_ANSWERS)
    if len(prompts) * count > MOST_ANSWERS:
        raise Problem(
            f"{counted(len(prompts), 'prompt')} with {count} answers each are too many: at most {MOST_ANSWERS} at once",
            key="n",
        )
    shared = {**_settings(told, is_chat, served), "echo": not is_chat and _flag(told, "echo")}
    name = f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}"
    seed = _whole(told, "seed", secrets.randbits(63), -(2**63), 2**63 - 1)
    first = _whole(told, "first_index", 0, 0, 2**62)
    requests: list[Request] = []
    for prompt in prompts:
        room = served.length - len(prompt)
        if room < 1 or not prompt:
            line = f"a prompt of {len(prompt)} tokens: this server takes 1 to {served.length - 1}, so that an answer fits, too"
            raise Problem(line, key="messages" if is_chat else "prompt")
        tokens, ids = _new_tokens(told, is_chat, room), tuple(prompt)
        for index in range(first, first + count):
            number = len(requests)
            requests.append(Request(f"{name}-{number}", ids, tokens, seed=seed, index=index, strips=is_chat, **shared))
    is_stream, with_ids = (_flag(told, key) for key in ("stream", "return_token_ids"))
    _refuse_much(requests, prompts, with_ids, served.tokenizer)
    options = told.get("stream_options") or {}
    if not isinstance(options, dict):
        raise Problem("stream_options must be an object", key="stream_options")
    with_usage = options.get("include_usage") is True
    return Asked(name, is_chat, int(time.time()), tuple(requests), is_stream, with_usage, with_ids)


def _refuse_much(requests: Sequence[Request], prompts: Sequence[list[int]], with_ids: bool, words: Tokenizer) -> None:
    """A short body can ask for any number of answers that repeat what it holds. `prompts`: each once, of all these requests."""
    first, times = requests[0], len(requests) // len(prompts)
    repeated = times * sum(map(len, prompts))
    logprobs = sum((1 + request.logprobs) * request.new_tokens for request in requests)
    logprobs += repeated if first.echo and first.logprobs >= 0 else 0
    echoed = times * sum(int(words.lengths[prompt].sum()) for prompt in prompts) if first.echo else 0
    for key, count, most, what in (
        ("logprobs", logprobs, MOST_LOGPROBS, "log-probabilities"),
        ("echo", echoed, MOST_ECHOED, "bytes of prompts in the answers"),
        ("return_token_ids", repeated * with_ids, MOST_IDS, "token ids of prompts in the answers"),
    ):
        if count > most:
            line = f"{count} {what} are too many: at most {most} per request"
            raise Problem(f"{line}; ask for fewer answers, tokens or alternatives", key=key)


def object_in(body: bytes) -> dict[str, Any]:
    try:
        told = parse_json(body, unique=True)
    except ValueError as problem:
        raise Problem(f"the body is not JSON: {printable(str(problem), 200)}") from problem
    if not isinstance(told, dict):
        raise Problem("the body is not a JSON object")
    return told


def _object(body: bytes, known: Sequence[str]) -> dict[str, Any]:
    told = object_in(body)
    for key, value in told.items():
        if key in known:
            continue
        if key not in _IDLE:
            raise Problem(f"unknown key {_shown(key)}{suggest(key, known)}", key=printable(key, 60))
        if value is not None and not any(type(value) is type(idle) and value == idle for idle in _IDLE[key]):
            raise Problem(f"{key} {_shown(value)}: this server does not support {key}; leave it out", key=key)
    return told


def _prompts(told: Mapping[str, Any], tokenizer: Tokenizer) -> list[list[int]]:
    """A text, ids, or several of either."""
    given = told.get("prompt")
    if isinstance(given, str) or (isinstance(given, list) and given and _is_ids(given)):
        given = [given]
    if not isinstance(given, list) or not given or not all(isinstance(one, str) or _is_ids(one) for one in given):
        raise Problem("prompt must be a text, a list of token ids, or a list of either", key="prompt")
    if len(given) > MOST_ANSWERS:
        raise Problem(f"{len(given)} prompts are too many: at most {MOST_ANSWERS} at once", key="prompt")
    found = []
    for one in given:
        ids = [*tokenizer.start, *tokenizer.encode(one)] if isinstance(one, str) else list(one)
        if any(not 0 <= number < tokenizer.vocab_size for number in ids):
            raise Problem(f"prompt: token ids must be from 0 to {tokenizer.vocab_size - 1}", key="prompt")
        found.append(ids)
    return found


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


def _conversation(told: Mapping[str, Any], tokenizer: Tokenizer) -> list[int]:
    messages = told.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Problem("messages must be a list of at least one message", key="messages")
    turns = [(_role(message), _content(message)) for message in messages]
    if turns[-1][0] == chat.LEARNED:
        raise Problem("the last message is the assistant's: there is nothing to answer", key="messages")
    try:
        chat.check(tokenizer)
        return chat.prompt(tokenizer, turns)
    except chat.Unfit as problem:
        raise Problem(f"messages: {problem.line}", key="messages") from problem
    except Refusal as problem:
        raise Problem(problem.line, key="messages") from problem


def _role(message: Any) -> str:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in chat.ROLES:
        raise Problem(f"messages: a role must be one of {', '.join(chat.ROLES)}, not {_shown(role)}", key="messages")
    return str(role)


def _content(message: Mapping[str, Any]) -> bytes:
    if extra := message.keys() - {"role", "content", "name"}:
        raise Problem(
            f"messages: this server does not support the key {_shown(min(extra))} of a message", key="messages"
        )
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise Problem("messages: content must be a text, or a list of parts that are texts", key="messages")
    return "".join(map(str, texts)).encode("utf-8", "surrogatepass")


def _settings(told: Mapping[str, Any], is_chat: bool, served: Served) -> dict[str, Any]:
    """Of all answers alike."""
    tokenizer = served.tokenizer
    stops = told.get("stop")
    stops = [stops] if isinstance(stops, str) else stops or []
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(_is_stop(text) for text in stops):
        line = f"stop must be a text or up to {MOST_STOPS} texts, of 1 to {LONGEST_STOP} characters"
        raise Problem(line, key="stop")
    more = told.get("stop_token_ids") or []
    if not isinstance(more, list) or len(more) > MOST_STOPS or not all(type(one) is int for one in more):
        raise Problem(f"stop_token_ids must be a list of up to {MOST_STOPS} ids", key="stop_token_ids")
    on_update = told.get("on_update") or FINISH
    if on_update not in (FINISH, CONTINUE):
        raise Problem(f"on_update must be {FINISH} or {CONTINUE}", key="on_update")
    ends = tokenizer.stop_ids if is_chat else (tokenizer.end_id,)
    return {
        "sampling": _sampling(told),
        "stop": frozenset([*ends, *more]),
        "stop_texts": tuple(stops),
        "logprobs": _logprobs(told, is_chat),
        "on_update": on_update,
    }


def _is_stop(text: Any) -> bool:
    return isinstance(text, str) and 0 < len(text) <= LONGEST_STOP


def _sampling(told: Mapping[str, Any]) -> Sampling:
    temperature, top_p = _number(told, "temperature", 1.0), _number(told, "top_p", 1.0)
    try:
        return checked(temperature, _whole(told, "top_k", 0, 0, 2**31), top_p)
    except Refusal as refusal:
        raise Problem(refusal.line, key="temperature") from refusal


def _logprobs(told: Mapping[str, Any], is_chat: bool) -> int:
    """-1: none; else of how many more than the token itself."""
    if not is_chat:
        return _whole(told, "logprobs", -1, 0, MOST_ALTERNATIVES)
    more = _whole(told, "top_logprobs", 0, 0, MOST_ALTERNATIVES)
    if not _flag(told, "logprobs"):
        if more:
            raise Problem("top_logprobs needs logprobs: true", key="top_logprobs")
        return -1
    return more


def _new_tokens(told: Mapping[str, Any], is_chat: bool, room: int) -> int:
    key = "max_completion_tokens" if told.get("max_completion_tokens") is not None else "max_tokens"
    found = _whole(told, key, min(room, DEFAULT_TOKENS) if not is_chat else room, 1, 2**31)
    if found > room:
        raise Problem(f"{key} {found} is too large: only {room} tokens are left after the prompt", key=key)
    return found


def _whole(told: Mapping[str, Any], key: str, default: int, least: int, most: int) -> int:
    value = told.get(key)
    if value is None:
        return default
    if type(value) is not int or not least <= value <= most:
        raise Problem(f"{key} must be a whole number from {least} to {most}, not {_shown(value)}", key=key)
    return value


def _number(told: Mapping[str, Any], key: str, default: float) -> float:
    value = told.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise Problem(f"{key} must be a number, not {_shown(value)}", key=key)
    return float(value)


def _flag(told: Mapping[str, Any], key: str) -> bool:
    value = told.get(key)
    if value is not None and not isinstance(value, bool):
        raise Problem(f"{key} must be true or false, not {_shown(value)}", key=key)
    return bool(value)


def _shown(value: Any) -> str:
    return printable(repr(value), 60)


# ---- what is answered ----


def error(line: str, status: int, key: str = "") -> bytes:
    kind = "invalid_request_error" if status < 500 else "server_error"
    told = {"message": line, "type": kind, "param": key or None, "code": status}
    return json.dumps({"error": told}).encode()


class Reply:
    """A body's answer as its events come: pieces of a stream, or one text at the end."""

    def __init__(self, asked: Asked, served: Served) -> None:
        self._asked, self._name = asked, served.name
        self._bytes: Callable[[int], bytes] = lambda token: served.tokenizer.decode_bytes([token])
        self._places = {request.id: place for place, request in enumerate(asked.requests)}
        self._events: list[list[Event]] = [[] for _ in asked.requests]
        self._open = set(self._places)
        self._lengths = served.tokenizer.lengths
        self._room = MOST_SAID + SAID_A_TOKEN * sum(request.new_tokens for request in asked.requests)

    @property
    def is_too_long(self) -> bool:
        """It says more than any published tokenizer can: a model may write the longest tokens only."""
        return self._room < 0

    @property
    def is_done(self) -> bool:
        return not self._open

    def take(self, event: Event) -> bytes:
        """What it adds to a stream; empty where there is none."""
        place = self._places[event.id]
        first = not self._events[place]
        self._events[place].append(event)
        self._room -= self._said(event, self._asked.requests[place])
        if event.finish:
            self._open.discard(event.id)
        if not self._asked.stream:
            return b""
        pieces = [self._chunk([self._piece(place, [event], first)])]
        if self.is_done:
            if self._asked.with_usage:
                pieces.append({**self._chunk([]), "usage": self._usage()})
            return b"".join(map(_line, pieces)) + b"data: [DONE]\n\n"
        return b"".join(map(_line, pieces))

    def _said(self, event: Event, request: Request) -> int:
        """Bytes of its tokens, each as often as it is written."""
        if event.token is None:
            return 0
        others = sum(int(self._lengths[token]) for token, _ in event.alternatives)
        return int(self._lengths[event.token]) * (1 + (request.logprobs >= 0)) + others

    def whole(self) -> bytes:
        choices = [self._choice(place, events) for place, events in enumerate(self._events)]
        return json.dumps({**self._head(""), "choices": choices, "usage": self._usage()}).encode()

    def _head(self, part: str) -> dict[str, Any]:
        kind = f"chat.completion{part}" if self._asked.is_chat else "text_completion"
        return {"id": self._asked.id, "object": kind, "created": self._asked.created, "model": self._name}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head(".chunk"), "choices": choices}

    def _usage(self) -> dict[str, int]:
        written = sum(event.token is not None for events in self._events for event in events)
        asked = self._asked.prompt_tokens
        return {"prompt_tokens": asked, "completion_tokens": written, "total_tokens": asked + written}

    def _choice(self, place: int, events: list[Event]) -> dict[str, Any]:
        text = "".join(event.text for event in events)
        said = {"message": {"role": chat.LEARNED, "content": text}} if self._asked.is_chat else {"text": text}
        return self._with_numbers(place, events, said)

    def _piece(self, place: int, events: list[Event], first: bool) -> dict[str, Any]:
        text = "".join(event.text for event in events)
        if not self._asked.is_chat:
            return self._with_numbers(place, events, {"text": text})
        delta = {"role": chat.LEARNED, "content": text} if first else {"content": text}
        return self._with_numbers(place, events, {"delta": delta})

    def _with_numbers(self, place: int, events: list[Event], said: dict[str, Any]) -> dict[str, Any]:
        request = self._asked.requests[place]
        choice = {"index": place, **said, "finish_reason": events[-1].finish or None}
        echoed = request.prompt if request.echo and events[0] is self._events[place][0] else ()
        if echoed:
            choice["text"] = b"".join(map(self._bytes, echoed)).decode("utf-8", "replace") + choice["text"]
        choice["logprobs"] = self._logprobs(events, echoed) if request.logprobs >= 0 else None
        if events[-1].finish:
            choice["weights"] = {"version": events[-1].version, "digest": events[-1].digest}
        if self._asked.with_ids:
            written = [event for event in events if event.token is not None]
            choice["token_ids"] = [event.token for event in written]
            choice["versions"] = [event.version for event in written]
            if events[0] is self._events[place][0]:
                choice["prompt_token_ids"] = list(request.prompt)
        return choice

    def _logprobs(self, events: list[Event], echoed: Sequence[int]) -> dict[str, Any]:
        """`echoed`: the prompt's tokens, where they are told, too: the first has no log-probability."""
        written = [event for event in events if event.token is not None]
        if self._asked.is_chat:
            return {
                "content": [
                    {
                        **self._entry(event.token, event.logprob),
                        "top_logprobs": [self._entry(*one) for one in event.alternatives],
                    }
                    for event in written
                ]
            }
        return {
            "tokens": [*map(self._text, echoed), *(self._text(event.token) for event in written)],
            "token_logprobs": [*([None] if echoed else []), *map(_finite, events[0].echo if echoed else ())]
            + [_finite(event.logprob) for event in written],
            "top_logprobs": [None for _ in echoed]
            + [{self._text(token): _finite(value) for token, value in event.alternatives} for event in written],
        }

    def _entry(self, token: int | None, logprob: float | None) -> dict[str, Any]:
        return {"token": self._text(token), "logprob": _finite(logprob), "bytes": list(self._bytes(token or 0))}

    def _text(self, token: int | None) -> str:
        return self._bytes(token or 0).decode("utf-8", "replace")


def _finite(value: float | None) -> float | None:
    """JSON has no other."""
    return value if value is not None and math.isfinite(value) else None


def _line(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"
