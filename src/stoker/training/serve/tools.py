"""Tool calls: what a client may ask for, how each family of models writes a call, and the calls in a completion's text.

A model writes calls as its chat template does. Three ways are known; another one is a `ToolFormat` more.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from stoker.contract.frozen import frozen
from stoker.training.serve.constrain import JSON_STYLE
from stoker.training.tokenizer.tokenizer import Tokenizer

MAX_TOOLS = 128
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)


class ToolCall(NamedTuple):
    name: str
    arguments: str  # JSON

    def to_json(self) -> dict[str, Any]:
        """Return the call in OpenAI's form. Mistral's templates take ids of nine letters and digits only."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": secrets.token_hex(5)[:9], "type": "function", "function": function}


@frozen
class ToolFormat:
    """`begin`: the text in front of a call; `end`: behind it (empty: calls last to the end of the completion)."""

    begin: str
    end: str
    arguments: str  # the key of a call's arguments
    is_list: bool = False  # all calls are one JSON list
    is_bare: bool = False  # a call is a completion that begins with {, with or without `begin`

    def calls_in(self, text: str) -> list[ToolCall] | None:
        """Return the calls in the text behind `begin`; None where it has none."""
        decoder = json.JSONDecoder()
        found: list[Any] = []
        rest = text.strip()
        while rest:
            try:
                value, end = decoder.raw_decode(rest)
            except (ValueError, RecursionError):
                return None
            found += value if isinstance(value, list) else [value]
            rest = rest[end:].lstrip(" \n;")
        calls = [self._call(value) for value in found]
        return [call for call in calls if call is not None] if calls and None not in calls else None

    def _call(self, value: Any) -> ToolCall | None:
        name = value.get("name") if isinstance(value, dict) else None
        arguments = value.get(self.arguments, {}) if isinstance(value, dict) else None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False))

    def grammar(self, tools: Iterable[Mapping[str, Any]], tokenizer: Tokenizer, is_single: bool) -> str:
        """Return a grammar in llguidance's Lark of completions that call one of these tools.

        Each function's parameters stay a document of their own, so that references in them (`#/$defs/...`) hold.
        """
        rules: list[str] = []
        functions = [tool["function"] for tool in tools]
        for number, function in enumerate(functions):
            head = json.dumps(f'{{"name": "{function["name"]}", "{self.arguments}": ')
            schema = {"type": "object", **(function.get("parameters") or {}), "x-guidance": JSON_STYLE}
            rules += [
                f'call_{number}: {head} arguments_{number} "}}"',
                f"arguments_{number}: %json {json.dumps(schema)}",
            ]
        rules.append(f"call: {' | '.join(f'call_{number}' for number in range(len(functions)))}")
        begin = self._literal(self.begin, tokenizer)
        if self.is_bare:
            start = "call"
        elif self.is_list:
            start = f'{begin} " [" call{"" if is_single else """ (", " call)*"""} "]"'
        else:
            marked = f'{begin} "\\n" call "\\n" {self._literal(self.end, tokenizer)}'
            start = marked if is_single else f'{marked} ("\\n" {marked})*'
        return "\n".join([f"start: {start}", *rules])

    @staticmethod
    def _literal(mark: str, tokenizer: Tokenizer) -> str:
        token = tokenizer.special.get(mark)
        return json.dumps(mark) if token is None else f"<[{token}]>"


# In this order: whose mark is in the chat template.
FORMATS = (
    ToolFormat("<tool_call>", "</tool_call>", "arguments"),  # Hermes, Qwen
    ToolFormat("[TOOL_CALLS]", "", "arguments", is_list=True),  # Mistral
    ToolFormat("<|python_tag|>", "", "parameters", is_bare=True),  # Llama 3
)


def format_of(tokenizer: Tokenizer) -> ToolFormat | None:
    """Return how the model writes calls, by its chat template; None: it has none that takes tools, or an unknown one."""
    sources = "" if tokenizer.template is None else "\n".join(tokenizer.template.sources.values())
    if not re.search(r"\btools\b", sources):
        return None
    known = next((one for one in FORMATS if one.begin in sources), None)
    if known is None and '"parameters": ' in sources and '{"name": ' in sources:
        return FORMATS[-1]
    return known


class ToolText:
    """Splits a completion's text into what is said and the calls, as it comes."""

    def __init__(self, how: ToolFormat) -> None:
        self._how = how
        self._held = ""  # may begin a call, or is a call that has not ended
        self._mark = ""  # what that call began with
        self._blank = ""  # whitespace that is said only if text follows, and not a call
        self._is_call = self._has_text = self._follows_call = False

    def feed(self, text: str, is_last: bool) -> tuple[str, list[ToolCall]]:
        """Return what is now certain to be said, and the calls that are now complete. `is_last`: no more text follows."""
        how = self._how
        self._held += text
        said: list[str] = []
        calls: list[ToolCall] = []
        while self._is_call or self._begins(said, is_last):
            self._is_call = True
            end = self._held.find(how.end) if how.end else -1
            if end < 0 and not is_last:
                break
            size = end + len(how.end) if end >= 0 else len(self._held)
            found = how.calls_in(self._held[:end] if end >= 0 else self._held)
            if found is None:  # no call after all
                self._say(self._mark + self._held[:size], said)
            else:
                calls += found
                self._blank, self._follows_call = "", True
            self._held, self._is_call = self._held[size:], False
        if is_last and not self._follows_call:
            said.append(self._blank)
        return "".join(said), calls

    def _say(self, text: str, said: list[str]) -> None:
        """Add the text to `said`, up to the whitespace at its end, which a call may follow."""
        text = self._blank + text
        end = len(text.rstrip())
        said.append(text[:end])
        self._blank = text[end:]
        if end:
            self._has_text, self._follows_call = True, False

    def _begins(self, said: list[str], is_last: bool) -> bool:
        """Move what is said to `said`. True: the rest is a call."""
        how, held = self._how, self._held
        if how.is_bare and not self._has_text and not is_last and not held.strip():
            return False
        if how.is_bare and not self._has_text and held.lstrip().startswith("{"):
            self._mark = ""
            return True
        before, self._mark, behind = held.partition(how.begin)
        kept = 0 if self._mark or is_last else _overlap(held, how.begin)
        text = before[: len(before) - kept]
        self._say(text, said)
        self._held = behind if self._mark else held[len(held) - kept :]
        return bool(self._mark)


def _overlap(text: str, mark: str) -> int:
    """Return how many of the last characters may begin the mark."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)


def checked_tools(value: Any) -> list[dict[str, Any]]:
    """Return the tools of a body. Raises ValueError with what is wrong."""
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise ValueError(f"tools must be a list of up to {MAX_TOOLS} functions")
    names = [_function_name(tool) for tool in value]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"tools: two functions are called {name}")
    return value


def _function_name(tool: Any) -> str:
    is_function = isinstance(tool, dict) and tool.get("type") == "function" and isinstance(tool.get("function"), dict)
    function = tool["function"] if is_function else {}
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            'tools: each must be {"type": "function", "function": {"name": …}}, with a name of up to 64 letters'
        )
    if not isinstance(function.get("parameters") or {}, dict):
        raise ValueError(f"tools: the parameters of {name} must be a JSON schema")
    return name


def with_parsed_arguments(calls: Any) -> list[dict[str, Any]]:
    """Return a message's tool calls with arguments as an object, as templates read them. Raises ValueError."""
    if not isinstance(calls, list):
        raise ValueError("tool_calls must be a list")
    return [_with_parsed_arguments(call) for call in calls]


def _with_parsed_arguments(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("tool_calls: each needs a function with a name")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as problem:
            raise ValueError(f"tool_calls: the arguments of {function['name'][:64]} are not JSON") from problem
    if not isinstance(arguments, dict):
        raise ValueError(f"tool_calls: the arguments of {function['name'][:64]} must be an object")
    return {**call, "function": {**function, "arguments": arguments}}
