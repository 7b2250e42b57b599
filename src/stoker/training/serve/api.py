"""OpenAI's completions and chat completions: parses bodies into requests, and writes events as clients read them. No torch.

Beside OpenAI's keys it knows some of vLLM's and its own `return_token_ids`, `first_index`, `on_update` (finish, continue) and
`min_weight_version`. An unknown key is refused: an answer that silently ignores a setting is wrong.
"""

from __future__ import annotations

import codecs
import json
import math
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from stoker.contract.errors import Refusal
from stoker.contract.frozen import frozen
from stoker.contract.options import suggest
from stoker.contract.text import escape, parse_json
from stoker.contract.units import plural
from stoker.training.generate.config import Sampling, checked
from stoker.training.serve.constrain import GrammarMatcher, Grammars, Unconstrainable
from stoker.training.serve.request import (
    CONTINUE,
    FINISH,
    LENGTH,
    MOST_ALTERNATIVES,
    STOP,
    Event,
    LogitAdjustments,
    PromptLogprob,
    Request,
)
from stoker.training.serve.tools import ToolCall, ToolFormat, ToolText, checked_tools, format_of, with_parsed_arguments
from stoker.training.tokenizer import chat
from stoker.training.tokenizer.tokenizer import Tokenizer

MOST_ANSWERS = 128  # of one body: prompts times n
MOST_STOPS, LONGEST_STOP = 16, 512
SHORT = 2000  # numbers in a response that is written in the event loop
DEFAULT_TOKENS = 16  # of a completion, as OpenAI's; a chat's answer may fill the context
MAX_BIASES = 1024  # entries of logit_bias
MAX_REPETITION_PENALTY = 100.0
# What has no meaning here: any value is accepted, since none changes the answer.
_IGNORED = ("user", "metadata", "store", "safety_identifier", "prompt_cache_key")
_BOTH = (
    "model", "stream", "stream_options", "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos",
    "skip_special_tokens", "max_tokens", "logprobs", "prompt_logprobs", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "logit_bias", "response_format", "return_token_ids", "on_update", "first_index", "min_weight_version", *_IGNORED,
)  # fmt: skip
_TEMPLATE = ("chat_template_kwargs", "add_generation_prompt", "continue_final_message")
_COMPLETION = (*_BOTH, "prompt", "echo")
_TOOLS = ("tools", "tool_choice", "parallel_tool_calls")
_CHAT = (*_BOTH, *_TEMPLATE, *_TOOLS, "messages", "max_completion_tokens", "top_logprobs")
_TOKENIZE = (*_TEMPLATE, "tools", "model", "prompt", "messages", "add_special_tokens", "return_token_strs")
# What OpenAI has and we don't, with the values that change nothing.
_IDLE: dict[str, tuple[Any, ...]] = {
    "echo": (False,), "best_of": (1,), "suffix": ("",), "tools": ([],), "tool_choice": ("none",),
    "parallel_tool_calls": (True, False), "service_tier": ("auto", "default"), "modalities": (["text"],),
}  # fmt: skip
_OF_A_MESSAGE = ("role", "content", "name", "provider_specific_fields")  # the last one is litellm's own
_WITH_TOOLS = ("tool_calls", "tool_call_id")
DEVELOPER, SYSTEM = "developer", "system"  # OpenAI's newer name of the system's role, which no published template knows


OTHER_MODEL = "other_model"  # code of an error: new weights are not for the model that is served


class Problem(Exception):
    """A client's mistake, in one sentence. `code`: OpenAI's word for it, if there is one."""

    def __init__(
        self, line: str, status: int = 400, key: str = "", code: str = "", headers: tuple[tuple[str, str], ...] = ()
    ) -> None:
        super().__init__(line)
        self.line, self.status, self.key, self.code, self.headers = line, status, key, code, headers


@frozen
class Served:
    """What the server has: the model's name, and the length of a prompt and its answer."""

    name: str
    tokenizer: Tokenizer
    length: int
    created: int = 0  # when the server started, in seconds since 1970
    grammars: Grammars | None = None  # None: completions can't be constrained


@frozen
class Asked:
    """A body: one request for each of its answers, in the order of their index."""

    id: str
    is_chat: bool
    created: int
    requests: tuple[Request, ...]
    stream: bool
    with_usage: bool
    with_ids: bool
    added: tuple[int, ...]  # of each request: tokens in front of its prompt that its text does not have
    echo: bool = False
    generates: bool = True  # False: max_tokens is 0, and the token that the engine samples all the same is dropped
    tools: ToolFormat | None = None  # how completions call tools; None: there are none
    prompt_logprobs: int = -1  # in vLLM's form, with this many alternatives; -1: none
    min_weight_version: int = -1  # older weights must not write the completions; -1: any may

    @property
    def prompt_tokens(self) -> int:
        """Of each prompt once."""
        first = self.requests[0].index
        return sum(len(request.prompt) for request in self.requests if request.index == first)


def read(body: bytes, is_chat: bool, served: Served) -> Asked:
    """Parse and check a body. Raises Problem."""
    told = _object(body, _CHAT if is_chat else _COMPLETION)
    _check_model(told, served)
    tools = _tools(told, served.tokenizer) if is_chat else _Tools()
    prompts = [_conversation(told, served.tokenizer, tools)] if is_chat else _prompts(told, served.tokenizer)
    added = [0] if is_chat else _added(told, served.tokenizer)
    count = _whole(told, "n", 1, 1, MOST_ANSWERS)
    if len(prompts) * count > MOST_ANSWERS:
        raise Problem(
            f"{plural(len(prompts), 'prompt')} with {count} answers each are too many: at most {MOST_ANSWERS} at once",
            key="n",
        )
    is_stream, with_ids = (_flag(told, key) for key in ("stream", "return_token_ids"))
    echo, prompt_logprobs = (
        not is_chat and _flag(told, "echo"),
        _whole(told, "prompt_logprobs", -1, 0, MOST_ALTERNATIVES),
    )
    if is_stream and prompt_logprobs >= 0:
        raise Problem("prompt_logprobs can't be streamed: leave out stream, or ask for echo and logprobs", key="stream")
    shared = _settings(told, is_chat, served)
    shared["prompt_logprobs"] = max(prompt_logprobs, shared["logprobs"] if echo else -1)
    name = f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}"
    seed = _whole(told, "seed", secrets.randbits(63), -(2**63), 2**63 - 1)
    first = _whole(told, "first_index", 0, 0, 2**62)
    constraint = _constraint(told, served, tools)
    if tools.how is not None:
        special = served.tokenizer.special
        shared["visible"] = frozenset(special[mark] for mark in (tools.how.begin, tools.how.end) if mark in special)
    requests: list[Request] = []
    generates = True
    for prompt in prompts:
        room = served.length - len(prompt)
        if room < 1 or not prompt:
            key = "messages" if is_chat else "prompt"
            if not prompt:
                raise Problem(f"{key}: the prompt has no tokens", key=key)
            raise _too_long(f"the prompt has {len(prompt)}, and a completion needs at least 1", served.length, key)
        tokens, ids = _new_tokens(told, is_chat, room, served.length), tuple(prompt)
        generates = tokens > 0
        for index in range(first, first + count):
            shared["constraint"] = None if constraint is None else constraint.copy()
            number = len(requests)
            requests.append(Request(f"{name}-{number}", ids, max(tokens, 1), seed=seed, index=index, **shared))
    return Asked(
        name,
        is_chat,
        int(time.time()),
        tuple(requests),
        is_stream,
        _with_usage(told, is_stream),
        with_ids,
        tuple(number for number in added for _ in range(count)),
        echo,
        generates,
        tools.how,
        prompt_logprobs,
        _whole(told, "min_weight_version", -1, 0, 2**62),
    )


def _with_usage(params: Mapping[str, Any], is_stream: bool) -> bool:
    key = "stream_options"
    options = params.get(key)
    if options is None:
        return False
    if not isinstance(options, dict):
        raise Problem(f"{key} must be an object", key=key)
    if not is_stream:
        raise Problem(f"{key} needs stream: true", key=key)
    if extra := options.keys() - {"include_usage", "include_obfuscation"}:  # there is nothing to obfuscate
        raise Problem(f"{key}: unknown key {_shown(min(extra))}", key=key)
    return _flag(options, "include_usage", of=key)


def tokenize(body: bytes, served: Served) -> dict[str, Any]:
    """Return the ids of a text or a conversation, in the form of vLLM's /tokenize. Raises Problem."""
    params, tokenizer = _object(body, _TOKENIZE), served.tokenizer
    _check_model(params, served)
    if ("prompt" in params) == ("messages" in params):
        raise Problem("either prompt or messages is needed", key="prompt")
    if "messages" in params:
        ids = _conversation(params, tokenizer, _tools(params, tokenizer), answers=False)
    else:
        text = params["prompt"]
        if not isinstance(text, str):
            raise Problem("prompt must be a text", key="prompt")
        start = tokenizer.start if _flag(params, "add_special_tokens", True) else ()
        ids = [*start, *tokenizer.encode(text)]
    texts = None
    if _flag(params, "return_token_strs"):
        texts = [tokenizer.decode_bytes([token]).decode("utf-8", "replace") for token in ids]
    return {"count": len(ids), "max_model_len": served.length, "tokens": ids, "token_strs": texts}


def detokenize(body: bytes, served: Served) -> dict[str, str]:
    """Return the text of token ids, in the form of vLLM's /detokenize. Raises Problem."""
    params = _object(body, ("model", "tokens"))
    _check_model(params, served)
    ids = params.get("tokens")
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise Problem("tokens must be a list of token ids", key="tokens")
    _check_ids(ids, served.tokenizer, "tokens")
    return {"prompt": served.tokenizer.decode(ids)}


def model_card(served: Served) -> dict[str, Any]:
    card = {"id": served.name, "object": "model", "created": served.created, "owned_by": "stoker"}
    return {**card, "max_model_len": served.length}


def _check_model(params: Mapping[str, Any], served: Served) -> None:
    if params.get("model") not in (None, served.name):
        raise unknown_model(params["model"], served)


def unknown_model(name: Any, served: Served) -> Problem:
    return Problem(f"no model {_shown(name)} here; this server has {served.name}", 404, "model", "model_not_found")


def object_in(body: bytes) -> dict[str, Any]:
    try:
        told = parse_json(body, unique=True)
    except ValueError as problem:
        raise Problem(f"the body is not JSON: {escape(str(problem), 200)}") from problem
    if not isinstance(told, dict):
        raise Problem("the body is not a JSON object")
    return told


def _object(body: bytes, known: Sequence[str]) -> dict[str, Any]:
    told = object_in(body)
    for key, value in told.items():
        if key in known:
            continue
        if key not in _IDLE:
            raise Problem(f"unknown key {_shown(key)}{suggest(key, known)}", key=escape(key, 60))
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
        _check_ids(ids, tokenizer, "prompt")
        found.append(ids)
    return found


def _added(told: Mapping[str, Any], tokenizer: Tokenizer) -> list[int]:
    """Return of each prompt how many tokens `_prompts` put in front of it."""
    given = told.get("prompt")
    prompts = given if isinstance(given, list) and not _is_ids(given) else [given]
    return [len(tokenizer.start) if isinstance(one, str) else 0 for one in prompts]


def _check_ids(ids: Collection[int], tokenizer: Tokenizer, key: str) -> None:
    if any(not 0 <= number < tokenizer.vocab_size for number in ids):
        raise Problem(f"{key}: token ids must be from 0 to {tokenizer.vocab_size - 1}", key=key)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


class _Tools(NamedTuple):
    """What a body says about tools."""

    tools: Sequence[dict[str, Any]] = ()
    how: ToolFormat | None = None
    must_call: Sequence[dict[str, Any]] = ()  # the completion must call one of these; empty: it need not
    is_single: bool = False  # one call at most


def _tools(params: Mapping[str, Any], tokenizer: Tokenizer) -> _Tools:
    choice = params.get("tool_choice")
    try:
        tools = checked_tools(params.get("tools") or [])
    except ValueError as problem:
        raise Problem(str(problem), key="tools") from problem
    named = None
    if isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("function"), dict):
        named = [tool for tool in tools if tool["function"]["name"] == choice["function"].get("name")]
        if not named:
            raise Problem("tool_choice names a function that is not among the tools", key="tool_choice")
    elif choice not in (None, "none", "auto", "required"):
        line = f"tool_choice must be none, auto, required or a function, not {_shown(choice)}"
        raise Problem(line, key="tool_choice")
    is_single = not _flag(params, "parallel_tool_calls", True) or named is not None
    if choice == "required" and not tools:
        raise Problem("tool_choice required needs tools", key="tool_choice")
    if not tools or choice == "none":
        return _Tools()
    how = format_of(tokenizer)
    if how is None:
        raise Problem(
            "the model's chat template takes no tools, or writes calls in a way that is not known", key="tools"
        )
    return _Tools(tools, how, tools if choice == "required" else named or (), is_single)


def _conversation(told: Mapping[str, Any], tokenizer: Tokenizer, tools: _Tools, answers: bool = True) -> list[int]:
    """Return the ids of a conversation and the beginning of its answer. `answers`: an answer follows."""
    messages = told.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Problem("messages must be a list of at least one message", key="messages")
    turns = chat.Conversation([_turn(message, tokenizer) for message in messages])
    turns.tools = tools.tools
    continues = _flag(told, "continue_final_message")
    opens_turn = _flag(told, "add_generation_prompt", not continues)
    if continues and opens_turn:
        line = "continue_final_message needs add_generation_prompt: false"
        raise Problem(line, key="add_generation_prompt")
    if continues and turns[-1][0] != chat.LEARNED:
        raise Problem(f"continue_final_message: the last message must be the {chat.LEARNED}'s", key="messages")
    if answers and not continues and turns[-1][0] == chat.LEARNED:
        raise Problem("the last message is the assistant's: there is nothing to answer", key="messages")
    variables = told.get("chat_template_kwargs") or {}
    if not isinstance(variables, dict):
        raise Problem("chat_template_kwargs must be an object", key="chat_template_kwargs")
    if taken := variables.keys() & {"messages", "tools", "add_generation_prompt", *tokenizer.names}:
        raise Problem(f"chat_template_kwargs can't set {_shown(min(taken))}", key="chat_template_kwargs")
    try:
        chat.check(tokenizer)
        return chat.prompt(tokenizer, turns, variables, opens_turn=opens_turn, continues=continues)
    except chat.Unfit as problem:
        raise Problem(f"messages: {problem.line}", key="messages") from problem
    except Refusal as problem:
        raise Problem(problem.line, key="messages") from problem


def _role(message: Any) -> str:
    role = message.get("role") if isinstance(message, dict) else None
    if role == DEVELOPER:
        return SYSTEM
    if role not in chat.ROLES:
        known = ", ".join([*chat.ROLES, DEVELOPER])
        raise Problem(f"messages: a role must be one of {known}, not {_shown(role)}", key="messages")
    return str(role)


def _turn(message: Any, tokenizer: Tokenizer) -> tuple[str, bytes]:
    role = _role(message)
    # A client that sends an answer back sends all keys of the SDK's message, most of them null.
    given = {key: value for key, value in message.items() if value not in (None, []) and key not in _OF_A_MESSAGE}
    if extra := given.keys() - _WITH_TOOLS:
        raise Problem(
            f"messages: this server does not support the key {_shown(min(extra))} of a message", key="messages"
        )
    if not given:
        return role, _content(message)
    if tokenizer.template is None:
        raise Problem("messages: tool calls need a model whose chat template takes them", key="messages")
    if "tool_calls" in given:
        try:
            given["tool_calls"] = with_parsed_arguments(given["tool_calls"])
        except ValueError as problem:
            raise Problem(f"messages: {problem}", key="messages") from problem
        message = {**message, "content": message.get("content") or ""}
    return chat.Turn(role, _content(message), given)


def _content(message: Mapping[str, Any]) -> bytes:
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
        "stop": frozenset([*(() if _flag(told, "ignore_eos") else ends), *more]),
        "stop_texts": tuple(stops),
        "logprobs": _logprobs(told, is_chat),
        "on_update": on_update,
        "strips": is_chat and not _flag(told, "continue_final_message"),
        "adjustments": _adjustments(told, tokenizer),
        "skip_special_tokens": _flag(told, "skip_special_tokens", True),
    }


def _adjustments(params: Mapping[str, Any], tokenizer: Tokenizer) -> LogitAdjustments | None:
    """Return what changes the logits; None where nothing does: such requests cost the engine nothing."""
    bias = params.get("logit_bias") or {}
    if not isinstance(bias, dict) or len(bias) > MAX_BIASES:
        raise Problem(f"logit_bias must be an object of up to {MAX_BIASES} token ids and numbers", key="logit_bias")
    if not all(key.isascii() and key.isdigit() and len(key) < 10 for key in bias):
        raise Problem("logit_bias: its keys must be token ids", key="logit_bias")
    _check_ids([int(key) for key in bias], tokenizer, "logit_bias")
    made = LogitAdjustments(
        tuple((int(key), _number(bias, key, 0.0, -100.0, 100.0, "logit_bias")) for key in bias),
        _number(params, "repetition_penalty", 1.0, 1 / MAX_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
        _number(params, "frequency_penalty", 0.0, -2.0, 2.0),
        _number(params, "presence_penalty", 0.0, -2.0, 2.0),
        _number(params, "min_p", 0.0, 0.0, 1.0),
    )
    return None if made == LogitAdjustments() else made


def _constraint(params: Mapping[str, Any], served: Served, tools: _Tools) -> GrammarMatcher | None:
    """Return the grammar of response_format, or of calls that must be made; None: any text."""
    key = "response_format"
    form = params.get(key)
    if form == {"type": "text"}:
        form = None
    if form is None and not tools.must_call:
        return None
    if served.grammars is None:
        raise Problem(f"{key} and tool_choice are not supported by this server", key=key)
    if _flag(params, "ignore_eos"):
        raise Problem("ignore_eos does not go with response_format or a tool_choice", key="ignore_eos")
    if tools.must_call:
        if form is not None:
            raise Problem("response_format does not go with a tool_choice that requires a call", key=key)
        assert tools.how is not None
        try:
            return served.grammars.lark(tools.how.grammar(tools.must_call, served.tokenizer, tools.is_single))
        except Unconstrainable as problem:
            raise Problem(f"tools: {problem}", key="tools") from problem
    form = form if isinstance(form, dict) else {}
    kind = form.get("type")
    if extra := form.keys() - {"type", *(["json_schema"] if kind == "json_schema" else [])}:
        line = f"{key}: unknown key {_shown(min(extra))}; a schema goes into json_schema, with type json_schema"
        raise Problem(line, key=key)
    if kind == "json_object":
        schema: Any = {"type": "object"}
    elif kind == "json_schema":
        about = form.get("json_schema")
        schema = about.get("schema") if isinstance(about, dict) else None
        if not isinstance(schema, dict):
            raise Problem("response_format: json_schema must be an object with a schema, which is an object", key=key)
    else:
        line = f"response_format: its type must be text, json_object or json_schema, not {_shown(kind)}"
        raise Problem(line, key=key)
    try:
        return served.grammars.json_schema(schema)
    except Unconstrainable as problem:
        raise Problem(f"response_format: {problem}", key=key) from problem


def _is_stop(text: Any) -> bool:
    return isinstance(text, str) and 0 < len(text) <= LONGEST_STOP


def _sampling(told: Mapping[str, Any]) -> Sampling:
    temperature, top_p = _number(told, "temperature", 1.0), _number(told, "top_p", 1.0)
    top_k = max(_whole(told, "top_k", 0, -1, 2**31), 0)  # -1 and 0: all
    if not 0.0 < top_p <= 1.0:
        raise Problem(f"top_p must be above 0 and at most 1, not {top_p:g}", key="top_p")
    try:
        return checked(temperature, top_k, top_p)
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


def _too_long(line: str, length: int, key: str) -> Problem:
    """In OpenAI's words, by which litellm and others know that the context is too small."""
    line = f"This model's maximum context length is {length} tokens: {line}"
    return Problem(line, key=key, code="context_length_exceeded")


def _new_tokens(told: Mapping[str, Any], is_chat: bool, room: int, length: int) -> int:
    key = "max_completion_tokens" if told.get("max_completion_tokens") is not None else "max_tokens"
    found = _whole(told, key, min(room, DEFAULT_TOKENS) if not is_chat else room, 1 if is_chat else 0, 2**31)
    if found > room:
        raise _too_long(f"the prompt has {length - room}, so {key} {found} is more than the {room} left", length, key)
    return found


def _whole(told: Mapping[str, Any], key: str, default: int, least: int, most: int) -> int:
    value = told.get(key)
    if value is None:
        return default
    if type(value) is not int or not least <= value <= most:
        raise Problem(f"{key} must be a whole number from {least} to {most}, not {_shown(value)}", key=key)
    return value


def _number(
    told: Mapping[str, Any], key: str, default: float, least: float = -math.inf, most: float = math.inf, of: str = ""
) -> float:
    """`of`: the key of the body, where `told` is a part of it."""
    value = told.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise Problem(f"{of or key} must be a number, not {_shown(value)}", key=of or key)
    if not least <= value <= most:
        raise Problem(f"{of or key} must be from {least:g} to {most:g}, not {_shown(value)}", key=of or key)
    return float(value)


def _flag(told: Mapping[str, Any], key: str, default: bool = False, of: str = "") -> bool:
    """`of`: the key of the body, where `told` is a part of it."""
    value = told.get(key)
    if value is not None and not isinstance(value, bool):
        raise Problem(f"{of and f'{of}: '}{key} must be true or false, not {_shown(value)}", key=of or key)
    return default if value is None else value


def _shown(value: Any) -> str:
    return escape(repr(value), 60)


# ---- what is answered ----


def error(line: str, status: int, key: str = "", code: str = "") -> bytes:
    """Return an error's body in OpenAI's form."""
    told = {"message": line, "type": _error_type(status), "param": key or None, "code": code or None}
    return json.dumps({"error": told}).encode()


def _error_type(status: int) -> str:
    if status >= 500:
        return "server_error"
    return {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}.get(
        status, "invalid_request_error"
    )


class _Offsets:
    """Where each token begins in the text of one completion, in characters."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def next(self, data: bytes) -> int:
        """Return where these bytes begin; the next ones follow them."""
        begin = self._length
        self._length += len(self._decoder.decode(data))
        return begin


class Reply:
    """Writes the response to one body as its events come: pieces of a stream, or all of it at the end."""

    def __init__(self, asked: Asked, served: Served) -> None:
        tokenizer = served.tokenizer
        self._asked, self._name = asked, served.name
        self._bytes: Callable[[int], bytes] = lambda token: tokenizer.decode_bytes([token])
        self._strips = tokenizer.told.decoding.strips
        self._hidden = frozenset(tokenizer.special.values()) if asked.requests[0].skip_special_tokens else frozenset()
        self._places = {request.id: place for place, request in enumerate(asked.requests)}
        self._events: list[list[Event]] = [[] for _ in asked.requests]
        self._offsets = [_Offsets() for _ in asked.requests]
        self._tools = [ToolText(asked.tools) if asked.tools is not None else None for _ in asked.requests]
        self._calls = [0] * len(asked.requests)  # that were written to the stream
        self._open = set(self._places)

    @property
    def is_done(self) -> bool:
        return not self._open

    @property
    def is_short(self) -> bool:
        """`whole` takes about a millisecond at most."""
        first = self._asked.requests[0]
        scores = sum(len(request.prompt) for request in self._asked.requests) * (1 + first.prompt_logprobs)
        return scores + sum(map(len, self._events)) * (2 + first.logprobs) < SHORT

    def take(self, event: Event) -> bytes:
        """Return what the event adds to a stream; empty where there is none."""
        if not self._asked.generates:
            event = event._replace(token=None, text="", logprob=None, alternatives=(), finish=event.finish and LENGTH)
        place = self._places[event.id]
        first = not self._events[place]
        self._events[place].append(event)
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

    def whole(self) -> bytes:
        """Return the body of a response that is not streamed."""
        choices = [self._choice(place, events) for place, events in enumerate(self._events)]
        body = {**self._head(""), "choices": choices, "usage": self._usage()}
        if self._asked.prompt_logprobs >= 0:
            if self._asked.is_chat:
                body["prompt_logprobs"] = self._prompt_logprobs(0)
            else:
                for place, choice in enumerate(choices):
                    choice["prompt_logprobs"] = self._prompt_logprobs(place)
        return json.dumps(body).encode()

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
        text, tools = "".join(event.text for event in events), self._tools[place]
        if not self._asked.is_chat:
            return self._with_numbers(place, events, {"text": text})
        message: dict[str, Any] = {"role": chat.LEARNED, "content": text}
        calls: list[ToolCall] = []
        if tools is not None:
            text, calls = tools.feed(text, is_last=True)
            message["content"] = text
        if calls:
            message |= {"content": text or None, "tool_calls": [call.to_json() for call in calls]}
        return self._with_numbers(place, events, {"message": message}, bool(calls))

    def _piece(self, place: int, events: list[Event], first: bool) -> dict[str, Any]:
        text = "".join(event.text for event in events)
        if not self._asked.is_chat:
            return self._with_numbers(place, events, {"text": text})
        tools, calls = self._tools[place], list[ToolCall]()
        if tools is not None:
            text, calls = tools.feed(text, is_last=bool(events[-1].finish))
        begin = self._calls[place]
        self._calls[place] += len(calls)
        # Null, as in a whole response, where there are calls alone.
        is_silent = tools is not None and not text and (self._calls[place] > 0 or not events[-1].finish)
        delta: dict[str, Any] = {"role": chat.LEARNED} if first else {}
        delta["content"] = None if is_silent else text
        if calls:
            delta["tool_calls"] = [{"index": begin + at, **call.to_json()} for at, call in enumerate(calls)]
        return self._with_numbers(place, events, {"delta": delta}, self._calls[place] > 0)

    def _with_numbers(
        self, place: int, events: list[Event], said: dict[str, Any], has_calls: bool = False
    ) -> dict[str, Any]:
        request, finish = self._asked.requests[place], events[-1].finish or None
        choice = {"index": place, **said, "finish_reason": "tool_calls" if has_calls and finish == STOP else finish}
        echoed = request.prompt if self._asked.echo and events[0] is self._events[place][0] else ()
        if echoed:
            choice["text"] = b"".join(self._echo(place)).decode("utf-8", "replace") + choice["text"]
        choice["logprobs"] = self._logprobs(place, events, echoed) if request.logprobs >= 0 else None
        if events[-1].finish:
            choice["weights"] = {"version": events[-1].version, "digest": events[-1].digest}
        if self._asked.with_ids:
            written = [event for event in events if event.token is not None]
            choice["token_ids"] = [event.token for event in written]
            choice["versions"] = [event.version for event in written]
            if events[0] is self._events[place][0]:
                choice["prompt_token_ids"] = list(request.prompt)
        return choice

    def _logprobs(self, place: int, events: list[Event], echoed: Sequence[int]) -> dict[str, Any]:
        """`echoed`: the prompt's tokens, where they are part of the text: the first has no log-probability."""
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
        most, offsets = self._asked.requests[place].logprobs, self._offsets[place]
        tokens: list[int] = list(echoed)
        logprobs: list[float | None] = [None] * bool(echoed)
        top: list[dict[str, float | None] | None] = [None] * bool(echoed)
        text_offset = [offsets.next(data) for data in self._echo(place)] if echoed else []
        for token, score in zip(echoed[1:], events[0].prompt if echoed else (), strict=True):
            logprobs.append(_finite(score.logprob))
            top.append(self._top(token, score.logprob, score.alternatives[:most]))
        for event in written:
            assert event.token is not None
            tokens.append(event.token)
            logprobs.append(_finite(event.logprob))
            top.append(self._top(event.token, event.logprob, event.alternatives))
            text_offset.append(offsets.next(b"" if event.token in self._hidden else self._bytes(event.token)))
        texts = list(map(self._text, tokens))
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": text_offset}

    def _echo(self, place: int) -> list[bytes]:
        """Return what each token of the prompt adds to the text: together the prompt as the client wrote it."""
        added = self._asked.added[place]
        pieces = [self._bytes(token) for token in self._asked.requests[place].prompt[added:]]
        if self._strips and pieces:
            pieces[0] = pieces[0].removeprefix(b" ")
        return [b""] * added + pieces

    def _top(
        self, token: int, logprob: float | None, alternatives: Sequence[tuple[int, float]]
    ) -> dict[str, float | None]:
        """The most likely tokens, and the token itself, which may not be one of them."""
        found: dict[str, float | None] = {}
        for one, value in (*alternatives, (token, logprob)):
            found.setdefault(self._text(one), _finite(value))  # the likelier one, where two have the same text
        return found

    def _prompt_logprobs(self, place: int) -> list[dict[str, Any] | None]:
        """In vLLM's form: of each token, by its id, and of the most likely ones instead."""
        most, request = self._asked.prompt_logprobs, self._asked.requests[place]
        found: list[dict[str, Any] | None] = [None]
        for token, score in zip(request.prompt[1:], self._events[place][0].prompt, strict=True):
            found.append(self._ranked(token, score, most))
        return found

    def _ranked(self, token: int, score: PromptLogprob, most: int) -> dict[str, Any]:
        ranked = [(token, score.logprob, score.rank)]
        ranked += [(one, value, place + 1) for place, (one, value) in enumerate(score.alternatives[:most])]
        return {
            str(one): {"logprob": _finite(value), "rank": rank, "decoded_token": self._text(one)}
            for one, value, rank in reversed(ranked)  # of two with the same id the token's own rank stays
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
