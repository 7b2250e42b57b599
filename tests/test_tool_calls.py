"""Tools in `stoker serve`: a model's own template offers them, calls are read from its text, and can be required."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")
pytest.importorskip("llguidance")

from published import PUBLISHED
from stoker.training.model import hf
from stoker.training.model.config import ModelConfig
from stoker.training.model.decoder import Decoder
from stoker.training.serve.constrain import Grammars
from stoker.training.serve.tools import FORMATS, ToolText
from stoker.training.tokenizer.tokenizer import load
from test_serve import CONTEXT, Server, pieces

CHAT = "/v1/chat/completions"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds two numbers",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": [1, 2]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False}}}
MESSAGES = [{"role": "user", "content": "the river"}]
QWEN, MISTRAL, LLAMA = FORMATS


def model_with(name: str, folder: Path) -> Path:
    """An untrained model whose tokenizer and chat template are of a published kind."""
    tokens = PUBLISHED[name].folder(folder / "tokenizer")
    shape = ModelConfig(
        layers=2, dim=32, heads=4, kv_heads=2, head_dim=8, ff=48, vocab_size=load(str(tokens)).vocab_size, init_std=0.3
    )
    model = Decoder(shape, CONTEXT * 4)
    model.start(5)
    hf.save(model, str(folder / "hf"), say=lambda _: None, tokenizer_folder=str(tokens))
    return folder / "hf"


@pytest.fixture(scope="module", params=["qwen-3", "mistral-v3"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = model_with(request.param, tmp_path_factory.mktemp("model"))
    with Server(folder, "--name", "small", "--slots", "4", "--context", str(CONTEXT * 4)) as started:
        yield started


def calls_of(server: Server, **body: Any) -> list[list[dict[str, Any]]]:
    """Of each choice."""
    status, answer = server.ask(CHAT, {"messages": MESSAGES, "tools": [ADD, NOW], "max_tokens": 300, **body})
    assert status == 200, answer
    if not body.get("stream"):
        assert all(one["finish_reason"] == "tool_calls" and not one["message"]["content"] for one in answer["choices"])
        return [one["message"]["tool_calls"] for one in answer["choices"]]
    found: dict[int, list[dict[str, Any]]] = {}
    for part in pieces(answer):
        for one in part["choices"]:
            assert one["finish_reason"] in (None, "tool_calls") and not one["delta"]["content"]
            found.setdefault(one["index"], []).extend(one["delta"].get("tool_calls", []))
    for calls in found.values():
        assert [call.pop("index") for call in calls] == list(range(len(calls)))
    return [found[index] for index in sorted(found)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_call_is_made_with_arguments_of_its_schema(server: Server, stream: bool) -> None:
    body = {
        "n": 16,
        "seed": 3,
        "temperature": 5,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "stream": stream,
    }
    names = set()
    for calls in calls_of(server, **body):
        (call,) = calls
        assert call["type"] == "function" and len(call["id"]) == 9
        arguments = json.loads(call["function"]["arguments"])
        names.add(call["function"]["name"])
        if call["function"]["name"] == "add":
            assert set(arguments) == {"a", "b"} and 0 <= arguments["a"] <= 99 and arguments["b"] in (1, 2)
        else:
            assert call["function"]["name"] == "now" and arguments == {}
    assert names == {"add", "now"}


def test_a_named_function_is_the_one_that_is_called(server: Server) -> None:
    named = {"type": "function", "function": {"name": "now"}}
    (calls,) = calls_of(server, tool_choice=named)
    assert [call["function"] for call in calls] == [{"name": "now", "arguments": "{}"}]


def test_parameters_may_refer_to_their_own_definitions(server: Server) -> None:
    """As pydantic writes a model within a model. Two functions may give different definitions the same name."""
    digit = {"type": "object", "properties": {"v": {"enum": [1, 2]}}, "required": ["v"], "additionalProperties": False}
    word = {**digit, "properties": {"v": {"enum": ["x", "y"]}}}
    tools = [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {
                    "properties": {"of": {"$ref": "#/$defs/Part"}},
                    "required": ["of"],
                    "additionalProperties": False,
                    "$defs": {"Part": part},
                },
            },
        }
        for name, part in (("digit", digit), ("word", word))
    ]
    found = set()
    for calls in calls_of(server, tools=tools, n=12, seed=1, temperature=5, tool_choice="required"):
        for call in calls:
            found.add((call["function"]["name"], json.loads(call["function"]["arguments"])["of"]["v"]))
    assert found == {("digit", 1), ("digit", 2), ("word", "x"), ("word", "y")}


def test_a_stream_of_calls_alone_has_no_content(server: Server) -> None:
    """The SDK puts pieces together: null and nothing else is null, as in a whole response."""
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    body: dict[str, Any] = {"model": "small", "messages": MESSAGES, "tools": [NOW], "max_tokens": 100, "seed": 1}
    called = {**body, "tool_choice": "required", "parallel_tool_calls": False}
    with client.chat.completions.stream(**called) as events:
        message = events.get_final_completion().choices[0].message
    assert message.content is None and [call.function.name for call in message.tool_calls] == ["now"]
    whole = client.chat.completions.create(**body).choices[0].message.content
    parts = [part.choices[0].delta.content for part in client.chat.completions.create(**body, stream=True)]
    assert whole and "".join(part or "" for part in parts) == whole


def test_several_calls_are_the_same_whole_or_streamed(server: Server) -> None:
    body = {"n": 8, "seed": 3, "temperature": 5, "tool_choice": "required", "tools": [NOW]}
    whole, streamed = calls_of(server, **body), calls_of(server, **body, stream=True)
    assert max(map(len, whole)) > 1
    assert [[call["function"] for call in calls] for calls in whole] == [
        [call["function"] for call in calls] for calls in streamed
    ]


def test_the_sdk_sends_a_calls_result_back(server: Server) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": "small", "tools": [ADD, NOW], "max_tokens": 100, "seed": 1}
    first = client.chat.completions.create(
        **asked, messages=MESSAGES, tool_choice="required", parallel_tool_calls=False
    )
    (call,) = first.choices[0].message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    messages: list[Any] = [*MESSAGES, first.choices[0].message, result]
    second = client.chat.completions.create(**asked, messages=messages)
    assert second.usage.prompt_tokens > first.usage.prompt_tokens and second.choices[0].finish_reason
    plain = client.chat.completions.create(**asked, messages=messages, tool_choice="none")
    assert plain.choices[0].message.tool_calls is None and plain.usage.prompt_tokens < second.usage.prompt_tokens


def test_wrong_tools_are_refused_in_one_line(server: Server) -> None:
    for wrong in (
        {"tools": 5}, {"tools": [{}]}, {"tools": [ADD, ADD]}, {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        {"tools": [ADD], "tool_choice": "perhaps"}, {"tool_choice": "required"},
        {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "now"}}},
        {"tools": [ADD], "tool_choice": "required", "response_format": {"type": "json_object"}},
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "strange"}}}], "tool_choice": "required"},
        {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}, *MESSAGES]},
    ):  # fmt: skip
        status, answer = server.ask(CHAT, {"messages": MESSAGES, **wrong})
        assert status == 400 and "\n" not in answer["error"]["message"], wrong


def test_a_template_without_tools_refuses_them(tmp_path: Path) -> None:
    with Server(model_with("llama-3", tmp_path)) as server:
        status, answer = server.ask(CHAT, {"messages": MESSAGES, "tools": [ADD]})
    assert status == 400 and answer["error"]["param"] == "tools"


CALL = '{"name": "add", "arguments": {"a": 1}}'
OTHER = '{"name": "now", "arguments": {}}'
TEXTS = [
    (QWEN, f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>", "Let me see.", ["add"]),
    (QWEN, f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{OTHER}\n</tool_call>\n", "", ["add", "now"]),
    (QWEN, f" \n<tool_call>\n{CALL}\n</tool_call> Done. \n", " Done. \n", ["add"]),
    (QWEN, "2 < 3 and <tool_ box", "2 < 3 and <tool_ box", []),
    (QWEN, "<tool_call>\nadd 1\n</tool_call> done", "<tool_call>\nadd 1\n</tool_call> done", []),
    (QWEN, f"<tool_call>\n{CALL[:20]}", f"<tool_call>\n{CALL[:20]}", []),
    (MISTRAL, f"[TOOL_CALLS] [{CALL}, {OTHER}]", "", ["add", "now"]),
    (MISTRAL, "[TOOL] no call", "[TOOL] no call", []),
    (LLAMA, CALL.replace("arguments", "parameters"), "", ["add"]),
    (LLAMA, f"  <|python_tag|>{CALL.replace('arguments', 'parameters')}", "", ["add"]),
    (LLAMA, "{a, b} is a set", "{a, b} is a set", []),
    (LLAMA, "the set {a}", "the set {a}", []),
]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("how", "text", "said", "names"), TEXTS)
def test_calls_are_found_in_a_text_however_it_is_cut(
    how: Any, text: str, said: str, names: list[str], size: int
) -> None:
    splitter, found, calls = ToolText(how), "", []
    for begin in range(0, len(text), size):
        more, new = splitter.feed(text[begin : begin + size], is_last=begin + size >= len(text))
        found += more
        calls += new
    assert found == said and [call.name for call in calls] == names
    assert all(isinstance(json.loads(call.arguments), dict) for call in calls)


@pytest.mark.parametrize(("how", "text"), [
    (QWEN, '<tool_call>\n{"name": "add", "arguments": {"a": 7, "b": 2}}\n</tool_call>'),
    (MISTRAL, '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 7, "b": 2}}]'),
    (LLAMA, '{"name": "add", "parameters": {"a": 7, "b": 2}}'),
])  # fmt: skip
def test_each_formats_grammar_allows_its_calls_and_what_it_allows_is_read(how: Any, text: str, tmp_path: Path) -> None:
    tokenizer = load(str(PUBLISHED["llama-3"].folder(tmp_path)))
    matcher = Grammars(tokenizer).lark(how.grammar([NOW, ADD], tokenizer, is_single=True))
    for token in tokenizer.continued(text):
        assert matcher.allowed()[token] and not matcher.is_complete
        matcher.accept(token)
    assert matcher.is_complete and not matcher.has_failed
    (said, calls) = ToolText(how).feed(text, is_last=True)
    assert not said and [(call.name, json.loads(call.arguments)) for call in calls] == [("add", {"a": 7, "b": 2})]
