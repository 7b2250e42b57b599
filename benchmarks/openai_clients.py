"""The openai SDK, litellm and lm-evaluation-harness against `stoker serve`: a table of requests and answers, then minutes of mixed load.

    python benchmarks/openai_clients.py                  the table, and ten minutes with 64 clients
    python benchmarks/openai_clients.py --seconds 0      the table alone
    python benchmarks/openai_clients.py --seconds 0 --sdk-only   without litellm and lm_eval

Needs a Python with openai, litellm, mcp (for litellm's tools), lm_eval[api], accelerate and transformers beside Stoker. The model is small and untrained, in fp32 on the CPU, with
the tokenizer and chat template of a published one. `ok` in the table: the answer is what the request alone asks for, see `check`.
Under load every answer must be the one that the same request got while nothing else ran; memory is the server's resident set.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic

ROOT = Path(__file__).resolve().parent.parent
CONTEXT = 1024
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Oslo"]}, "degrees": {"type": "integer", "minimum": 0, "maximum": 40}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "the weather of a city", "parameters": SCHEMA},
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
MESSAGES = [{"role": "user", "content": "How is the weather in Oslo?"}]
Row = tuple[str, str, str, bool]


def is_weather(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"city", "degrees"} and value["city"] in ("Bern", "Oslo") and 0 <= value["degrees"] <= 40


class Server:
    def __init__(self, folder: str, slots: int = 16, *flags: str) -> None:
        command = [sys.executable, "-m", "stoker", "serve", folder, "--port", "0", "--name", "small"]
        command += ["--context", str(CONTEXT), "--slots", str(slots), "--device", "cpu", *flags]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split()[0]

    def resident(self) -> int:
        """Bytes."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) << 10

    def numbers(self) -> dict[str, float]:
        import urllib.request

        with urllib.request.urlopen(self.url.removesuffix("/v1") + "/metrics") as reply:
            lines = reply.read().decode().splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    def has_loaded(self, package: str) -> bool:
        return f"/{package}/" in Path(f"/proc/{self.process.pid}/maps").read_text()

    def is_idle(self) -> bool:
        """Whether nothing is left of any request, within a while."""
        for _ in range(300):
            numbers = self.numbers()
            if not any(numbers[f"stoker_serve_{name}"] for name in ("running", "waiting", "blocks_held")):
                return True
            time.sleep(0.1)
        return False

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


class Table:
    def __init__(self) -> None:
        self.rows: list[Row] = []

    def check(self, client: str, request: str, ask: Callable[[], tuple[Any, bool]]) -> None:
        """`ask` returns what was answered and whether it is what the request asks for."""
        try:
            answer, is_right = ask()
        except Exception as problem:  # a row of the table, whatever it is
            answer, is_right = f"{type(problem).__name__}: {problem}", False
        text = " ".join(str(answer).split())
        self.rows.append((client, request, text[:77] + "..." if len(text) > 80 else text, is_right))
        print(f"{'ok   ' if is_right else 'WRONG'} {client}: {request}: {self.rows[-1][2]}", flush=True)

    def markdown(self) -> str:
        lines = ["| client | request | answer | ok |", "|---|---|---|---|"]
        for client, request, answer, is_right in self.rows:
            shown = answer.replace("|", "\\|").replace("`", "'").encode("ascii", "replace").decode()
            lines.append(f"| {client} | {request} | {shown} | {'yes' if is_right else 'NO'} |")
        return "\n".join(lines)


# ---- the table ----


def texts_of(answer: Any) -> list[str]:
    return [choice.text if hasattr(choice, "text") else choice.message.content for choice in answer.choices]


def refusal_of(ask: Callable[[], Any]) -> tuple[str, dict[str, Any]]:
    """Return the SDK's error class and the body of the error that the request gets."""
    try:
        ask()
    except openai.APIStatusError as error:
        return type(error).__name__, dict(error.body)  # type: ignore[call-overload]
    return "accepted", {}


class Part(pydantic.BaseModel):
    street: Literal["a", "b"]
    number: int = pydantic.Field(ge=0, le=99)


class Person(pydantic.BaseModel):
    name: Literal["Ann", "Zoë 🙂"]
    home: Part
    work: Part | None
    pet: Literal["cat"] | bool


class move(pydantic.BaseModel):
    """move somewhere"""

    to: Part


class stay(pydantic.BaseModel):
    """stay there"""

    days: Literal[1, 2]


def with_openai(table: Table, server: Server) -> None:
    client = openai.OpenAI(base_url=server.url, api_key="none", timeout=120)
    chat, text = client.chat.completions.create, client.completions.create
    same: dict[str, Any] = {"model": "small", "messages": MESSAGES, "max_tokens": 12, "seed": 3}
    plain: dict[str, Any] = {"model": "small", "prompt": "The river", "max_tokens": 12, "seed": 3}
    whole = chat(**same).choices[0].message.content

    def post(path: str, body: dict[str, Any]) -> Any:
        other = client.with_options(base_url=server.url.removesuffix("/v1"))
        return other.post(path, body=body, cast_to=dict[str, Any])

    def tokenize(**body: Any) -> list[int]:
        return post("/tokenize", body)["tokens"]

    # -- plain answers

    def sync() -> tuple[Any, bool]:
        answer = chat(**same)
        is_right = answer.choices[0].message.content == whole and answer.usage.completion_tokens == 12
        return answer.choices[0].finish_reason, is_right

    def seeds() -> tuple[Any, bool]:
        body = {**same, "max_tokens": 30}
        seeded = {texts_of(chat(**body))[0] for _ in range(5)}
        unseeded = {texts_of(chat(**{**body, "seed": openai.NOT_GIVEN}))[0] for _ in range(5)}
        several = texts_of(chat(**body, n=4))
        is_right = len(seeded) == 1 and len(unseeded) == 5 and several[0] in seeded and len(set(several)) == 4
        return f"{len(seeded)} and {len(unseeded)} texts", is_right

    def stream() -> tuple[Any, bool]:
        body = {**same, "n": 3, "logprobs": True, "top_logprobs": 2, "max_tokens": 24}
        answer, parts = chat(**body), list(chat(**body, stream=True, stream_options={"include_usage": True}))
        joined, entries, ends = [""] * 3, [[], [], []], [None] * 3  # type: ignore[var-annotated]
        for choice in (choice for part in parts for choice in part.choices):
            joined[choice.index] += choice.delta.content or ""
            entries[choice.index] += choice.logprobs.content
            ends[choice.index] = choice.finish_reason or ends[choice.index]
        is_right = joined == texts_of(answer) and entries == [one.logprobs.content for one in answer.choices]
        is_right &= ends == [one.finish_reason for one in answer.choices] and parts[-1].usage == answer.usage
        is_right &= all(len(one.top_logprobs) >= 2 and one.logprob <= 0 for one in entries[0])
        return f"{len(parts)} parts", is_right and not parts[-1].choices

    def streamed_completion() -> tuple[Any, bool]:
        body = {
            **plain,
            "prompt": ["Once", "Über"],
            "n": 2,
            "max_tokens": 20,
            "logprobs": 2,
            "echo": True,
            "stop": ["er"],
        }
        answer, parts = text(**body), list(text(**body, stream=True))
        joined, values, offsets = [""] * 4, [[], [], [], []], [[], [], [], []]  # type: ignore[var-annotated]
        for choice in (choice for part in parts for choice in part.choices):
            joined[choice.index] += choice.text
            values[choice.index] += choice.logprobs.token_logprobs
            offsets[choice.index] += choice.logprobs.text_offset
        is_right = joined == texts_of(answer) and values == [one.logprobs.token_logprobs for one in answer.choices]
        is_right &= offsets == [one.logprobs.text_offset for one in answer.choices]
        prompts = [prompt for prompt in body["prompt"] for _ in range(2)]
        is_right &= all(one.startswith(prompt) for one, prompt in zip(joined, prompts, strict=True))
        return [one.finish_reason for one in answer.choices], is_right

    def stops() -> tuple[Any, bool]:
        body = {**plain, "max_tokens": 60, "temperature": 0.8}
        (base,) = texts_of(text(**body))
        wrong, tried = [], 0
        for begin in range(1, len(base) - 4, 5):
            for stop in (base[begin : begin + size] for size in (1, 3, 4)):
                if "\ufffd" in stop:
                    continue
                tried, want = tried + 1, base[: base.index(stop)]
                answer = text(**body, stop=[stop])
                streamed = "".join(part.choices[0].text for part in text(**body, stop=[stop], stream=True))
                if texts_of(answer) != [want] or streamed != want or answer.choices[0].finish_reason != "stop":
                    wrong.append(stop)
        return f"{tried} stop texts", tried > 10 and not wrong

    def asynchronous() -> tuple[Any, bool]:
        async def ask() -> str:
            async with openai.AsyncOpenAI(base_url=server.url, api_key="none", timeout=120) as other:
                return (await other.chat.completions.create(**same)).choices[0].message.content

        return "the same text", asyncio.run(ask()) == whole

    def many(streams: bool) -> tuple[Any, bool]:
        async def one(client: openai.AsyncOpenAI, seed: int) -> str:
            body = {**same, "seed": seed}
            if not streams:
                return (await client.chat.completions.create(**body)).choices[0].message.content
            parts = [part async for part in await client.chat.completions.create(**body, stream=True)]
            return "".join(part.choices[0].delta.content or "" for part in parts)

        async def ask() -> list[str]:
            # The SDK's own timeout and retries.
            async with openai.AsyncOpenAI(base_url=server.url, api_key="none") as client:
                return await asyncio.gather(*(one(client, number % 4) for number in range(512)))

        texts = asyncio.run(ask())
        distinct = [len(set(texts[first::4])) for first in range(4)]
        turned_away = server.numbers()["stoker_serve_turned_away_total"]
        is_right = len(texts) == 512 and distinct == [1, 1, 1, 1] and texts[3] == whole and not turned_away
        return f"{len(texts)} answers", is_right

    def disconnects() -> tuple[Any, bool]:
        long = {**same, "max_tokens": 900, "n": 16}
        for _ in range(8):
            answer = chat(**long, stream=True, extra_body={"ignore_eos": True})
            next(iter(answer))
            answer.close()
        impatient = client.with_options(timeout=0.3, max_retries=0)
        for _ in range(4):  # not streamed
            try:
                impatient.chat.completions.create(**long, extra_body={"ignore_eos": True})
            except openai.APITimeoutError:
                continue
            return "answered", False
        aborted = server.numbers()['stoker_serve_answers_total{finish="abort"}']
        idle = server.is_idle()
        return "12 left, nothing still runs" if idle else server.numbers(), idle and aborted > 0

    # -- tools

    def required_tool() -> tuple[Any, bool]:
        answer = chat(**{**same, "max_tokens": 200}, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
        (call,) = answer.choices[0].message.tool_calls
        is_right = call.function.name == "weather" and is_weather(call.function.arguments)
        return f"{call.function.name}({call.function.arguments})", is_right and answer.choices[
            0
        ].message.content is None

    def streamed_tool() -> tuple[Any, bool]:
        named = {"type": "function", "function": {"name": "weather"}}
        parts = list(chat(**{**same, "max_tokens": 200}, tools=[TOOL], tool_choice=named, stream=True))
        calls = [call for part in parts for call in part.choices[0].delta.tool_calls or ()]
        arguments = "".join(call.function.arguments for call in calls)
        return arguments, is_weather(arguments) and parts[-1].choices[0].finish_reason == "tool_calls"

    def parallel_tools() -> tuple[Any, bool]:
        functions = [openai.pydantic_function_tool(move), openai.pydantic_function_tool(stay)]
        body = {**same, "max_tokens": 250, "tools": functions, "tool_choice": "required"}
        counts = []
        for seed in range(8):
            answer = client.chat.completions.parse(**{**body, "seed": seed}).choices[0]
            with client.chat.completions.stream(**{**body, "seed": seed}) as events:
                list(events)
                streamed = events.get_final_completion().choices[0]
            calls = [[call.function.parsed_arguments for call in one.message.tool_calls] for one in (answer, streamed)]
            assert calls[0] == calls[1] and streamed.message.content == answer.message.content
            assert all(isinstance(call, (move, stay)) for call in calls[0]) and answer.finish_reason == "tool_calls"
            counts.append(len(calls[0]))
        return f"{counts} calls", max(counts) > 1

    def tool_choices() -> tuple[Any, bool]:
        counts = [
            chat(**same, **more).usage.prompt_tokens
            for more in ({}, {"tools": [TOOL], "tool_choice": "none"}, {"tools": [TOOL], "tool_choice": "auto"})
        ]
        return f"prompts of {counts} tokens", counts[0] == counts[1] < counts[2]

    def tool_conversation() -> tuple[Any, bool]:
        asked = {**same, "max_tokens": 200, "tools": [TOOL]}
        first = chat(**asked, tool_choice="required", parallel_tool_calls=False)
        message = first.choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3 degrees"}
        second = chat(**{**asked, "max_tokens": 12, "messages": [*MESSAGES, message, result]})
        return second.choices[0].finish_reason, second.usage.prompt_tokens > first.usage.prompt_tokens + 10

    # -- JSON

    def schema() -> tuple[Any, bool]:
        answer = chat(**{**same, "max_tokens": 200}, response_format=FORMAT).choices[0].message.content
        return answer, is_weather(answer)

    def parsed() -> tuple[Any, bool]:
        body = {**same, "max_tokens": 300, "response_format": Person}
        people = [client.chat.completions.parse(**{**body, "seed": seed}).choices[0].message for seed in range(4)]
        with client.chat.completions.stream(**{**body, "seed": 0}) as events:
            content = "".join(event.delta for event in events if event.type == "content.delta")
        is_right = all(isinstance(one.parsed, Person) for one in people) and content == people[0].content
        return people[0].content, is_right and any("🙂" in one.content for one in people)

    def split_characters() -> tuple[Any, bool]:
        value = "日本語🙂👩‍👩‍👧é"
        about = {"name": "x", "schema": {**SCHEMA, "properties": {"a": {"const": value}}, "required": ["a"]}}
        body = {**same, "max_tokens": 200, "response_format": {"type": "json_schema", "json_schema": about}}
        parts = [part.choices[0].delta.content for part in chat(**body, stream=True)]
        is_right = json.loads("".join(parts)) == {"a": value} and not any("\ufffd" in part for part in parts)
        return f"{len(parts)} parts", is_right

    def any_json() -> tuple[Any, bool]:
        messages = [{"role": "user", "content": "JSON, please."}]
        body = {**same, "messages": messages, "max_tokens": 300, "temperature": 0.2}
        choice = chat(**body, response_format={"type": "json_object"}).choices[0]
        is_object = choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)
        return f"{choice.finish_reason}: {choice.message.content}", choice.message.content.startswith("{") and is_object

    def bad_schemas() -> tuple[Any, bool]:
        lines = []
        for bad in (
            {"type": "nonsense"},
            {"not": {"type": "string"}},
            {"$ref": "#/nowhere"},
            {"type": "string", "pattern": "^(?=a)a$"},
            {"type": "integer", "minimum": 5, "maximum": 3},
            {"oneOf": [{"type": "integer"}, {"type": "number"}]},
            {"type": "array", "uniqueItems": True},
        ):
            about = {"name": "x", "schema": bad}
            kind, error = refusal_of(
                partial(chat, **same, response_format={"type": "json_schema", "json_schema": about})
            )
            assert (kind, error["param"]) == ("BadRequestError", "response_format") and "\n" not in error["message"]
            lines.append(error["message"])
        return f"{len(lines)} schemas: {lines[1]}", all("the schema can't be compiled: " in line for line in lines)

    # -- refusals

    def refused() -> tuple[Any, bool]:
        cases: list[tuple[str, str, str | None, dict[str, Any]]] = [
            ("BadRequestError", "best_off", None, {"extra_body": {"best_off": 3}}),
            ("BadRequestError", "stream_options", None, {"stream": True, "stream_options": {"usage": True}}),
            ("BadRequestError", "response_format", None, {"response_format": {"type": "json_object", "schema": {}}}),
            ("BadRequestError", "messages", None, {"messages": []}),
            ("BadRequestError", "messages", None, {"messages": [{"role": "user", "content": None}]}),
            ("BadRequestError", "messages", "context_length_exceeded", {"messages": MESSAGES * 100}),
            ("BadRequestError", "max_tokens", "context_length_exceeded", {"max_tokens": CONTEXT}),
            ("BadRequestError", "temperature", None, {"temperature": -1}),
            ("BadRequestError", "n", None, {"n": 0}),
            ("BadRequestError", "tool_choice", None, {"tool_choice": "required"}),
            ("NotFoundError", "model", "model_not_found", {"model": "other"}),
        ]
        for kind, param, code, change in cases:
            got, error = refusal_of(partial(chat, **{**same, **change}))
            assert (got, error.get("param"), error.get("code")) == (kind, param, code), (change, got, error)
            assert error["type"] == "invalid_request_error" and error["message"], error
        return f"{len(cases)} refusals", True

    # -- scores and tokens

    def echo() -> tuple[Any, bool]:
        answer = text(**{**plain, "max_tokens": 0}, echo=True, logprobs=2)
        scores = answer.choices[0].logprobs
        is_right = answer.choices[0].text == "The river" and answer.usage.completion_tokens == 0
        is_right &= scores.token_logprobs[0] is None and all(one <= 0 for one in scores.token_logprobs[1:])
        is_right &= all(
            token in ("<|endoftext|>", "The river"[offset : offset + len(token)])
            for token, offset in zip(scores.tokens, scores.text_offset, strict=True)
        )
        return [scores.text_offset, scores.token_logprobs[-1]], is_right

    def prompt_logprobs() -> tuple[Any, bool]:
        ids = tokenize(prompt="The river")
        scored = text(**{**plain, "max_tokens": 1}, extra_body={"prompt_logprobs": 2}).choices[0].prompt_logprobs
        echoed = text(**{**plain, "max_tokens": 0}, echo=True, logprobs=0).choices[0].logprobs.token_logprobs
        own = [entry[str(token)]["logprob"] for token, entry in zip(ids[1:], scored[1:], strict=True)]
        is_right = scored[0] is None and own == echoed[1:] and all(2 <= len(entry) <= 3 for entry in scored[1:])
        return f"{len(own)} tokens", is_right

    def tokens() -> tuple[Any, bool]:
        ids = tokenize(prompt="The river é 🙂", add_special_tokens=False)
        back = post("/detokenize", {"tokens": ids})["prompt"]
        counted = len(tokenize(messages=MESSAGES)) == chat(**same).usage.prompt_tokens
        return f"{len(ids)} tokens", back == "The river é 🙂" and counted

    # -- sampling

    def biased() -> tuple[Any, bool]:
        (river,) = {tuple(tokenize(prompt=" r", add_special_tokens=False))}
        always = texts_of(text(**plain, logit_bias={str(river[0]): 100}))[0]
        greedy = {**plain, "temperature": 0, "max_tokens": 40}
        repeats = []
        for more in (
            {},
            {"frequency_penalty": 2},
            {"presence_penalty": 2},
            {"extra_body": {"repetition_penalty": 20.0}},
        ):
            extra = {"return_token_ids": True, "ignore_eos": True, **more.pop("extra_body", {})}
            ids = text(**greedy, **more, extra_body=extra).choices[0].token_ids
            repeats.append(len(ids) - len(set(ids)))
        return f"{repeats} repeated tokens", always == " r" * 12 and repeats[0] > max(repeats[1:])

    def filtered() -> tuple[Any, bool]:
        hot = {**plain, "temperature": 1.5}
        (greedy,) = texts_of(text(**{**plain, "temperature": 0}))
        narrow = [texts_of(text(**hot, extra_body=extra))[0] for extra in ({"min_p": 1}, {"top_k": 1})]
        is_open = texts_of(text(**hot, extra_body={"top_k": -1})) == texts_of(text(**hot))
        return "the greedy text", narrow == [greedy, greedy] and is_open

    def ends() -> tuple[Any, bool]:
        end = tokenize(prompt="")[0]  # what stands before a text is what ends one
        body = {**plain, "logit_bias": {str(end): 100}}
        stopped, ignored, shown = (
            text(**body, extra_body=extra)
            for extra in ({}, {"ignore_eos": True}, {"ignore_eos": True, "skip_special_tokens": False})
        )
        counts = [answer.usage.completion_tokens for answer in (stopped, ignored, shown)]
        is_right = stopped.choices[0].finish_reason == "stop" and texts_of(ignored) == [""]
        return f"{counts} tokens", counts == [1, 12, 12] and is_right and texts_of(shown) == ["<|endoftext|>" * 12]

    def template() -> tuple[Any, bool]:
        texts = [
            texts_of(chat(**{**same, "messages": [{"role": role, "content": "Be short."}, *MESSAGES]}, **more))[0]
            for role, more in (("system", {}), ("developer", {"metadata": {"a": "b"}, "store": True, "user": "me"}))
        ]
        thinking = [
            chat(**same, extra_body={"chat_template_kwargs": {"enable_thinking": value}}).usage.prompt_tokens
            for value in (True, False)
        ]
        return f"prompts of {thinking} tokens", texts[0] == texts[1] and thinking[0] < thinking[1]

    def continued() -> tuple[Any, bool]:
        messages = [*MESSAGES, {"role": "assistant", "content": "In Oslo it is"}]
        extra = {"continue_final_message": True, "add_generation_prompt": False}
        ids = tokenize(messages=messages, **extra)
        answer = chat(**{**same, "messages": messages}, extra_body={**extra, "return_token_ids": True})
        begun = tokenize(prompt="In Oslo it is", add_special_tokens=False)
        is_right = answer.choices[0].prompt_token_ids == ids and ids[-len(begun) :] == begun
        return f"{len(ids)} tokens of the prompt", is_right

    def models() -> tuple[Any, bool]:
        names = [one.id for one in client.models.list()]
        kind, _ = refusal_of(lambda: client.models.retrieve("other"))
        is_right = names == ["small"] and client.models.retrieve("small").id == "small"
        return f"{names}, other: {kind}", is_right and kind == "NotFoundError"

    is_lean = not server.has_loaded("llguidance")
    table.check("openai", "chat, twice with one seed", sync)
    table.check("openai", "5 chats with one seed, 5 without, n 4", seeds)
    table.check("openai", "chat, n 3, logprobs, usage: streamed as whole", stream)
    table.check("openai", "completions, 2 prompts, n 2, echo, logprobs, stop: streamed as whole", streamed_completion)
    table.check("openai", "stop texts across tokens, streamed and whole", stops)
    table.check("openai (async)", "chat", asynchronous)
    table.check("openai (async)", "512 chats at once, the SDK's defaults", lambda: many(False))
    table.check("openai (async)", "512 streams at once, the SDK's defaults", lambda: many(True))
    table.check("openai", "8 streams closed after their first part, 4 requests given up", disconnects)
    table.check("openai", "before the first schema llguidance is not loaded", lambda: ("not loaded", is_lean))
    table.check("openai", "tools, tool_choice required", required_tool)
    table.check("openai", "tools, one function required, streamed", streamed_tool)
    table.check("openai", "parallel calls of pydantic tools: parse() as stream()", parallel_tools)
    table.check("openai", "tool_choice none and auto", tool_choices)
    table.check("openai", "a tool's result in the messages", tool_conversation)
    table.check("openai", "response_format json_schema", schema)
    table.check("openai", "a pydantic model with $ref, anyOf: parse() as stream()", parsed)
    table.check("openai", "characters of several tokens, streamed", split_characters)
    table.check("openai", "response_format json_object", any_json)
    table.check("openai", "schemas that can't be compiled", bad_schemas)
    table.check("openai", "refusals in OpenAI's form (unknown keys, too long, ...)", refused)
    table.check("openai", "completion, echo, logprobs, text_offset, max_tokens 0", echo)
    table.check("openai", "prompt_logprobs, as echo's", prompt_logprobs)
    table.check("openai", "/tokenize, /detokenize", tokens)
    table.check("openai", "logit_bias; frequency, presence, repetition penalty", biased)
    table.check("openai", "min_p 1, top_k 1, top_k -1", filtered)
    table.check("openai", "end of text, ignore_eos, skip_special_tokens", ends)
    table.check("openai", "role developer, metadata, chat_template_kwargs", template)
    table.check("openai", "continue_final_message", continued)
    table.check("openai", "models.list, models.retrieve", models)


def with_servers_that_end(table: Table, folder: str) -> None:
    """Full queues, signals and connections, each with a server of its own."""
    long: dict[str, Any] = {"model": "small", "messages": MESSAGES, "max_tokens": 300, "stream": True, "seed": 1}
    long["extra_body"] = {"ignore_eos": True}

    def started(server: Server, **body: Any) -> tuple[openai.OpenAI, Any]:
        client = openai.OpenAI(base_url=server.url, api_key="none", timeout=120)
        answer = client.chat.completions.create(**{**long, **body})
        next(iter(answer))
        return client, answer

    def killed() -> tuple[Any, bool]:
        server = Server(folder)
        _, answer = started(server, n=8)
        server.process.kill()
        server.process.wait()
        try:
            list(answer)
        except Exception as problem:
            return type(problem).__name__, True
        return "no error", False

    def drained() -> tuple[Any, bool]:
        server = Server(folder, slots=2)
        client, answer = started(server, n=12)
        server.process.send_signal(signal.SIGTERM)
        once, statuses = client.with_options(max_retries=0), set()
        while 503 not in statuses:
            try:
                once.chat.completions.create(model="small", messages=MESSAGES, max_tokens=1)
                statuses.add(200)
            except openai.InternalServerError as refusal:
                statuses.add(refusal.status_code)
        finished = [choice.finish_reason for part in answer for choice in part.choices if choice.finish_reason]
        code = server.process.wait(60)
        return f"503; {len(finished)} answers finished, exit code {code}", finished == ["length"] * 12 and code == 0

    def cut() -> tuple[Any, bool]:
        server = Server(folder, 1, "--grace", "0.2s")
        _, answer = started(server, n=64, max_tokens=900)
        code = server.stop()
        try:
            list(answer)
        except Exception as problem:
            return f"{type(problem).__name__}, exit code {code}", code == 0
        return "no error", False

    def full() -> tuple[Any, bool]:
        server = Server(folder, 1, "--queue", "1")
        try:
            client, answer = started(server, n=2)
            short = {"model": "small", "messages": MESSAGES, "max_tokens": 2}
            try:
                client.with_options(max_retries=0).chat.completions.create(**short)
            except openai.RateLimitError as refusal:
                seconds, kind = refusal.response.headers["Retry-After"], refusal.body["type"]  # type: ignore[index]
            answer.close()
            again = client.chat.completions.create(**short)  # with the SDK's retries
            return f"429, Retry-After {seconds}", kind == "rate_limit_error" and bool(again.choices)
        finally:
            server.stop()

    def connections() -> tuple[Any, bool]:
        server = Server(folder)
        try:
            port = int(server.url.split(":")[2].split("/")[0])
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.connect()
            first, statuses = connection.sock, []
            body = {"prompt": "x", "max_tokens": 2}
            for path, sent in (
                ("/v1/completions", body), ("/v1/completions", {"bad": 1}), ("/nothing", {"x": "x" * 900_000}),
                ("/v1/completions", {**body, "stream": True}), ("/v1/completions", {"prompt": "x" * (1 << 20)}), ("/v1/completions", body),
            ):  # fmt: skip
                connection.request("POST", path, json.dumps(sent), {"Content-Type": "application/json"})
                response = connection.getresponse()
                response.read()
                statuses.append(response.status)
            is_kept = connection.sock is first
            data = json.dumps(body).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
            first.sendall((head.encode() + data) * 3)  # without waiting for the answers
            with first.makefile("rb") as responses:
                for _ in range(3):
                    statuses.append(int(responses.readline().split()[1]))
                    responses.read(int(http.client.parse_headers(responses)["Content-Length"]))
            return statuses, is_kept and statuses == [200, 400, 404, 200, 413, 200, 200, 200, 200]
        finally:
            server.stop()

    table.check("openai", "kill -9 of the server in a stream: the SDK raises", killed)
    table.check("openai", "SIGTERM with a running stream and new requests", drained)
    table.check("openai", "SIGTERM, the grace is over: the SDK raises", cut)
    table.check("openai", "a full queue, then the SDK's retries", full)
    table.check("http.client", "one connection: answers, errors, a stream, then 3 requests at once", connections)


def with_litellm(table: Table, server: Server) -> None:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network for a price list
    import litellm

    litellm.suppress_debug_info = True
    same: dict[str, Any] = {
        "model": "openai/small",
        "api_base": server.url,
        "api_key": "none",
        "messages": MESSAGES,
        "seed": 3,
    }

    def plain() -> tuple[Any, bool]:
        answer = litellm.completion(**same, max_tokens=12)
        return answer.choices[0].finish_reason, answer.usage.completion_tokens == 12

    def stream() -> tuple[Any, bool]:
        parts = list(litellm.completion(**same, max_tokens=12, stream=True))
        joined = "".join(part.choices[0].delta.content or "" for part in parts)
        return f"{len(parts)} parts", joined == litellm.completion(**same, max_tokens=12).choices[0].message.content

    def tool() -> tuple[Any, bool]:
        (call,) = (
            litellm.completion(**same, max_tokens=200, tools=[TOOL], tool_choice="required")
            .choices[0]
            .message.tool_calls
        )
        return call.function.arguments, is_weather(call.function.arguments)

    def schema() -> tuple[Any, bool]:
        answer = litellm.completion(**same, max_tokens=200, response_format=FORMAT).choices[0].message.content
        return answer, is_weather(answer)

    def vllm_provider() -> tuple[Any, bool]:
        answer = litellm.completion(**{**same, "model": "hosted_vllm/small"}, max_tokens=12, top_k=5)
        return answer.choices[0].finish_reason, answer.usage.completion_tokens == 12

    def text() -> tuple[Any, bool]:
        body = {
            "model": "text-completion-openai/small",
            "api_base": server.url,
            "api_key": "none",
            "prompt": "a",
            "seed": 3,
        }
        answer = litellm.text_completion(**body, max_tokens=5)
        parts = litellm.text_completion(**body, max_tokens=5, stream=True)
        is_same = "".join(part.choices[0].text or "" for part in parts) == answer.choices[0].text
        return answer.choices[0].finish_reason, answer.usage.completion_tokens <= 5 and is_same

    def conversation() -> tuple[Any, bool]:
        asked = {**same, "max_tokens": 200, "tools": [TOOL]}
        message = litellm.completion(**asked, tool_choice="required", parallel_tool_calls=False).choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "name": "weather", "content": "3 degrees"}
        answers = [
            litellm.completion(**{**asked, "messages": [*MESSAGES, said, result], "max_tokens": 12})
            for said in (message, message.model_dump())
        ]
        return answers[0].choices[0].finish_reason, len({one.choices[0].message.content for one in answers}) == 1

    def too_long() -> tuple[Any, bool]:
        try:
            litellm.completion(**{**same, "messages": MESSAGES * 100})
        except litellm.ContextWindowExceededError as problem:
            return type(problem).__name__, True
        return "accepted", False

    def asynchronous() -> tuple[Any, bool]:
        async def ask() -> set[str]:
            answers = await asyncio.gather(*(litellm.acompletion(**same, max_tokens=12) for _ in range(64)))
            return {answer.choices[0].message.content for answer in answers}

        return "1 text", len(asyncio.run(ask())) == 1

    table.check("litellm", "chat", plain)
    table.check("litellm", "chat, streamed", stream)
    table.check("litellm", "tools, tool_choice required", tool)
    table.check("litellm", "response_format json_schema", schema)
    table.check("litellm", "chat as hosted_vllm, top_k 5", vllm_provider)
    table.check("litellm", "text_completion, whole and streamed", text)
    table.check("litellm", "its own message and a tool's result sent back", conversation)
    table.check("litellm", "a prompt that is too long: ContextWindowExceededError", too_long)
    table.check("litellm (async)", "64 chats at once", asynchronous)


def with_lm_eval(table: Table, server: Server, folder: str, place: Path) -> None:
    """Tasks from a local file, one of each request kind, compared with what lm_eval's own `hf` model computes of the same folder."""
    rows = [
        {"question": f"{a} + {b} =", "good": f" {a + b}", "bad": f" {a + b + 1}"}
        for a in range(2, 8)
        for b in range(2, 6)
    ]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {place}/rows.jsonl\ntest_split: test\n"
    choices = "doc_to_text: question\ndoc_to_choice: '{{[good, bad]}}'\ndoc_to_target: 0\ntarget_delimiter: ''\n"
    (place / "choose.yaml").write_text(
        f"task: choose\noutput_type: multiple_choice\n{data}{choices}metric_list:\n  - metric: acc\n"
    )
    (place / "rolling.yaml").write_text(
        f"task: rolling\noutput_type: loglikelihood_rolling\n{data}doc_to_text: ''\ndoc_to_target: '{{{{question}}}} {{{{good}}}} apples'\n"
        "metric_list:\n  - metric: bits_per_byte\n"
    )
    (place / "write.yaml").write_text(
        f"task: write\noutput_type: generate_until\n{data}doc_to_text: question\ndoc_to_target: good\n"
        'generation_kwargs:\n  until: ["\\n"]\n  max_gen_toks: 8\n  do_sample: false\n  temperature: 0\nmetric_list:\n  - metric: exact_match\n'
    )

    def evaluate(kind: str, arguments: str, task: str, *flags: str) -> tuple[float, list[Any]]:
        out = place / f"{kind}-{task}{''.join(flags)}"
        command = [
            sys.executable,
            "-m",
            "lm_eval",
            "run",
            "--model",
            kind,
            "--model_args",
            arguments,
            "--tasks",
            task,
            "--log_samples",
        ]
        command += [
            "--include_path",
            str(place),
            "--output_path",
            str(out),
            "--device",
            "cpu",
            "--batch_size",
            "1",
            *flags,
        ]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none", "HF_HOME": str(place / "hf-home")}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900, check=False)
        if done.returncode:
            raise RuntimeError((done.stderr or done.stdout).strip().splitlines()[-1])
        (results,) = out.rglob("results_*.json")
        (samples,) = out.rglob(f"samples_{task}_*.jsonl")
        metrics = json.loads(results.read_text())["results"][task]
        value = next(number for name, number in metrics.items() if name.endswith(",none") and "stderr" not in name)
        rows = sorted((json.loads(line) for line in samples.read_text().splitlines()), key=lambda row: row["doc_id"])
        return float(value), [row["resps"] for row in rows]

    api = f"base_url={server.url}/completions,model=small,tokenizer={folder},tokenizer_backend=huggingface,num_concurrent=8,max_length={CONTEXT}"
    chat = f"base_url={server.url}/chat/completions,model=small,num_concurrent=8"
    local = f"pretrained={folder},dtype=float32"

    def compared(task: str, kind: str = "local-completions", arguments: str = api, *flags: str) -> tuple[Any, bool]:
        value, answers = evaluate(kind, arguments, task, *flags)
        wanted, own = evaluate("hf", local, task, *flags)
        flat = [(_leaf(a), _leaf(b)) for a, b in zip(answers, own, strict=True)]
        is_same = all(len(a) == len(b) and all(_agree(x, y) for x, y in zip(a, b, strict=True)) for a, b in flat)
        return f"{len(answers)} rows, {value:.4f} (hf: {wanted:.4f})", math.isclose(
            value, wanted, rel_tol=1e-3
        ) and is_same

    table.check("lm_eval", "multiple_choice (loglikelihood), as lm_eval's hf model", lambda: compared("choose"))
    table.check("lm_eval", "loglikelihood_rolling, as lm_eval's hf model", lambda: compared("rolling"))
    table.check("lm_eval", "generate_until, as lm_eval's hf model", lambda: compared("write"))
    through_chat = partial(compared, "write", "local-chat-completions", chat, "--apply_chat_template")
    table.check("lm_eval", "generate_until as chats, as lm_eval's hf model", through_chat)


def _leaf(value: Any) -> list[Any]:
    return [leaf for one in value for leaf in _leaf(one)] if isinstance(value, list) else [value]


def _agree(answer: Any, wanted: Any) -> bool:
    try:
        return math.isclose(float(answer), float(wanted), abs_tol=2e-3)
    except ValueError:
        return bool(answer == wanted)


# ---- the load ----


def requests(count: int = 80) -> list[dict[str, Any]]:
    """Chats and completions of all kinds. `kind` is ours."""
    draw, found = random.Random(7), []
    for number in range(count):
        body: dict[str, Any] = {
            "model": "small",
            "max_tokens": draw.randint(1, 40),
            "seed": draw.randrange(1000),
            "temperature": draw.choice([0, 0.7, 1]),
        }
        kind = draw.choice(["chat", "chat", "text", "tool", "schema", "logprobs", "echo", "penalty"])
        messages = [{"role": "user", "content": f"Question {number}: " + "why " * draw.randint(1, 30)}]
        if kind in ("text", "echo"):
            body["prompt"] = f"Once {number} " + "and " * draw.randint(1, 30)
            if kind == "echo":
                body |= {"echo": True, "logprobs": 2}
        else:
            body["messages"] = messages
        if kind == "tool":
            body |= {"tools": [TOOL], "tool_choice": "required", "max_tokens": 120}
        elif kind == "schema":
            body |= {"response_format": FORMAT, "max_tokens": 120}
        elif kind == "logprobs":
            body |= {"logprobs": True, "top_logprobs": 2}
        elif kind == "penalty":
            body |= {"frequency_penalty": 0.4, "extra_body": {"min_p": 0.02}}
        found.append(body | {"kind": kind})
    return found


async def ask(client: openai.AsyncOpenAI, request: dict[str, Any], streams: bool) -> tuple[Any, ...]:
    """What the answer says, the same whole or streamed."""
    body = {key: value for key, value in request.items() if key != "kind"}
    create = client.completions.create if "prompt" in body else client.chat.completions.create
    if not streams:
        choice = (await create(**body)).choices[0]
        calls = getattr(getattr(choice, "message", None), "tool_calls", None) or ()
        text = choice.text if "prompt" in body else choice.message.content or ""
        return text, tuple(call.function.arguments for call in calls), choice.finish_reason
    text, arguments, reason = "", [], None
    async for part in await create(**body, stream=True):
        choice = part.choices[0]
        text += choice.text if "prompt" in body else choice.delta.content or ""
        if "prompt" not in body:
            arguments += [call.function.arguments for call in choice.delta.tool_calls or ()]
        reason = choice.finish_reason or reason
    return text, tuple(arguments), reason


async def under_load(server: Server, clients: int, seconds: float) -> tuple[Counter[str], list[int], list[str]]:
    count: Counter[str] = Counter()
    sizes: list[int] = []
    wrong: list[str] = []
    asked = requests()
    async with openai.AsyncOpenAI(base_url=server.url, api_key="none") as client:
        wanted = [await ask(client, one, False) for one in asked]
        until = time.monotonic() + seconds

        async def one_client(number: int) -> None:
            draw = random.Random(number)
            while time.monotonic() < until:
                which, streams = draw.randrange(len(asked)), draw.random() < 0.5
                if streams and draw.random() < 0.2:
                    body = {key: value for key, value in asked[which].items() if key != "kind"}
                    create = client.completions.create if "prompt" in body else client.chat.completions.create
                    answer = await create(**body, stream=True)
                    await answer.close()
                    count["left"] += 1
                    continue
                try:
                    answered = await ask(client, asked[which], streams)
                except openai.OpenAIError as problem:
                    answered = (f"{type(problem).__name__}: {problem}",)
                is_right = answered == wanted[which]
                count["right" if is_right else "wrong"] += 1
                if not is_right:
                    wrong.append(f"{asked[which]['kind']} {which}: {answered} instead of {wanted[which]}")

        async def watch() -> None:
            while True:
                sizes.append(server.resident())
                await asyncio.sleep(1.0)

        watching = asyncio.create_task(watch())
        await asyncio.gather(*(one_client(number) for number in range(clients)))
        watching.cancel()
    return count, sizes, wrong


def make_model(place: Path) -> str:
    sys.path.insert(0, str(ROOT / "tests"))
    from published import PUBLISHED
    from stoker.training.model import hf
    from stoker.training.model.config import ModelConfig
    from stoker.training.model.decoder import Decoder
    from stoker.training.tokenizer.tokenizer import load

    tokens = PUBLISHED["qwen-3"].folder(place / "tokenizer")
    vocabulary = load(str(tokens)).vocab_size
    shape = ModelConfig(layers=2, dim=32, heads=4, kv_heads=2, head_dim=8, ff=48, vocab_size=vocabulary, init_std=0.3)
    model = Decoder(shape, CONTEXT)
    model.start(5)
    hf.save(model, str(place / "hf"), say=lambda _: None, tokenizer_folder=str(tokens))
    return str(place / "hf")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="of mixed load")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--sdk-only", action="store_true", help="leave out litellm and lm_eval")
    parser.add_argument("--out", default="", help="write the table here as Markdown")
    options = parser.parse_args()
    table, failed = Table(), False
    with tempfile.TemporaryDirectory(prefix="openai-clients-") as name:
        place = Path(name)
        folder = make_model(place)
        server = Server(folder)
        try:
            with_openai(table, server)
            with_servers_that_end(table, folder)
            if not options.sdk_only:
                with_litellm(table, server)
                with_lm_eval(table, server, folder, place)
            if options.seconds:
                count, sizes, wrong = asyncio.run(under_load(server, options.clients, options.seconds))
                tenths = [sizes[len(sizes) * part // 10 : len(sizes) * (part + 1) // 10] for part in range(10)]
                memory = [round(statistics.median(part) / 2**20) for part in tenths if part]
                idle = server.is_idle()
                print(f"load: {dict(count)}, MiB by tenths {memory}, most {max(sizes) >> 20}, idle after it: {idle}")
                for line in wrong[:5]:
                    print(f"  {line}")
                failed = bool(wrong) or not idle
        finally:
            code = server.stop()
    print(table.markdown())
    if options.out:
        Path(options.out).write_text(table.markdown() + "\n")
    return int(failed or bool(code) or not all(row[-1] for row in table.rows))


if __name__ == "__main__":
    sys.exit(main())
