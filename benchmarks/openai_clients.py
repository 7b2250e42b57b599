"""The openai SDK, litellm and lm-evaluation-harness against `stoker serve`: a table of requests and answers, then minutes of mixed load.

    python benchmarks/openai_clients.py                  the table, and ten minutes with 64 clients
    python benchmarks/openai_clients.py --seconds 0      the table alone

Needs a Python with openai, litellm, mcp (for litellm's tools), lm_eval, accelerate and transformers beside Stoker. The model is small and untrained, in fp32 on the CPU, with
the tokenizer and chat template of a published one. `ok` in the table: the answer is what the request alone asks for, see `check`.
Under load every answer must be the one that the same request got while nothing else ran; memory is the server's resident set.
"""

from __future__ import annotations

import argparse
import asyncio
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
from pathlib import Path
from typing import Any

import openai

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
    def __init__(self, folder: str, slots: int = 16) -> None:
        command = [sys.executable, "-m", "stoker", "serve", folder, "--port", "0", "--name", "small"]
        command += ["--context", str(CONTEXT), "--slots", str(slots), "--device", "cpu"]
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


def with_openai(table: Table, server: Server) -> None:
    client = openai.OpenAI(base_url=server.url, api_key="none", timeout=120)
    chat, text = client.chat.completions.create, client.completions.create
    same = {"model": "small", "messages": MESSAGES, "max_tokens": 12, "seed": 3}
    whole = chat(**same).choices[0].message.content

    def sync() -> tuple[Any, bool]:
        answer = chat(**same)
        return answer.choices[0].finish_reason, answer.choices[
            0
        ].message.content == whole and answer.usage.completion_tokens == 12

    def stream() -> tuple[Any, bool]:
        parts = list(chat(**same, stream=True, stream_options={"include_usage": True}))
        joined = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        return f"{len(parts)} parts", joined == whole and parts[-1].usage.completion_tokens == 12

    def asynchronous() -> tuple[Any, bool]:
        async def ask() -> str:
            async with openai.AsyncOpenAI(base_url=server.url, api_key="none", timeout=120) as other:
                return (await other.chat.completions.create(**same)).choices[0].message.content

        answer = asyncio.run(ask())
        return "the same text", answer == whole

    def many() -> tuple[Any, bool]:
        async def ask() -> list[str]:
            async with openai.AsyncOpenAI(
                base_url=server.url, api_key="none"
            ) as other:  # the SDK's own timeout and retries
                answers = (other.chat.completions.create(**{**same, "seed": number % 4}) for number in range(512))
                return [one.choices[0].message.content for one in await asyncio.gather(*answers)]

        texts = asyncio.run(ask())
        distinct = [len(set(texts[first::4])) for first in range(4)]
        return f"{len(texts)} answers", len(texts) == 512 and distinct == [1, 1, 1, 1] and texts[3] == whole

    def disconnects() -> tuple[Any, bool]:
        for _ in range(8):
            answer = chat(**{**same, "max_tokens": 900}, stream=True, extra_body={"ignore_eos": True})
            next(iter(answer))
            answer.close()
        idle = server.is_idle()
        return "8 left, nothing still runs" if idle else server.numbers(), idle

    def required_tool() -> tuple[Any, bool]:
        (call,) = (
            chat(**{**same, "max_tokens": 200}, tools=[TOOL], tool_choice="required").choices[0].message.tool_calls
        )
        return f"{call.function.name}({call.function.arguments})", call.function.name == "weather" and is_weather(
            call.function.arguments
        )

    def streamed_tool() -> tuple[Any, bool]:
        named = {"type": "function", "function": {"name": "weather"}}
        parts = list(chat(**{**same, "max_tokens": 200}, tools=[TOOL], tool_choice=named, stream=True))
        calls = [call for part in parts for call in part.choices[0].delta.tool_calls or ()]
        text = "".join(call.function.arguments for call in calls)
        return text, is_weather(text) and parts[-1].choices[0].finish_reason == "tool_calls"

    def tool_conversation() -> tuple[Any, bool]:
        call = {
            "id": "call_1",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city":"Oslo","degrees":3}'},
        }
        said = [
            *MESSAGES,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "3 degrees"},
        ]
        answer = chat(**{**same, "messages": said}, tools=[TOOL])
        return answer.choices[0].finish_reason, answer.usage.completion_tokens == 12

    def schema() -> tuple[Any, bool]:
        answer = chat(**{**same, "max_tokens": 200}, response_format=FORMAT).choices[0].message.content
        return answer, is_weather(answer)

    def any_json() -> tuple[Any, bool]:
        messages = [{"role": "user", "content": "JSON, please."}]
        answer = chat(
            model="small",
            messages=messages,
            max_tokens=300,
            seed=1,
            temperature=0.2,
            response_format={"type": "json_object"},
        )
        choice = answer.choices[0]
        is_whole = choice.finish_reason == "stop"
        if is_whole:
            json.loads(choice.message.content)
        return f"{choice.finish_reason}: {choice.message.content}", choice.message.content.startswith("{")

    def bad_schema() -> tuple[Any, bool]:
        try:
            chat(
                **same,
                response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}},
            )
        except openai.BadRequestError as refusal:
            return f"400: {refusal.body['message']}", True  # type: ignore[index]
        return "accepted", False

    def unknown() -> tuple[Any, bool]:
        try:
            chat(**same, extra_body={"best_off": 3})
        except openai.BadRequestError as refusal:
            return f"400: {refusal.body['message']}", "best_off" in str(refusal)  # type: ignore[index]
        return "accepted", False

    def probabilities() -> tuple[Any, bool]:
        answer = chat(**same, logprobs=True, top_logprobs=3).choices[0].logprobs.content
        return f"{len(answer)} tokens", len(answer) == 12 and all(
            len(one.top_logprobs) >= 3 and one.logprob <= 0 for one in answer
        )

    def echo() -> tuple[Any, bool]:
        answer = text(model="small", prompt="The river", max_tokens=0, echo=True, logprobs=2).choices[0]
        return answer.logprobs.token_logprobs, answer.text == "The river" and answer.logprobs.token_logprobs[0] is None

    def several() -> tuple[Any, bool]:
        answers = text(model="small", prompt=["a", "b"], n=2, max_tokens=4, seed=5, stop=["\n"]).choices
        return f"{len(answers)} answers", [one.index for one in answers] == [0, 1, 2, 3]

    def sampling() -> tuple[Any, bool]:
        extra = {
            "min_p": 0.05,
            "top_k": -1,
            "ignore_eos": True,
            "skip_special_tokens": True,
            "chat_template_kwargs": {"enable_thinking": False},
        }
        messages = [{"role": "developer", "content": "Be short."}, *MESSAGES]
        answer = chat(
            **{**same, "messages": messages}, frequency_penalty=0.5, presence_penalty=0.5, logit_bias={"7": -100}, metadata={"a": "b"}, extra_body=extra
        )  # fmt: skip
        return answer.choices[0].finish_reason, answer.usage.completion_tokens == 12

    def continued() -> tuple[Any, bool]:
        messages = [*MESSAGES, {"role": "assistant", "content": "In Oslo it is"}]
        extra = {"continue_final_message": True, "add_generation_prompt": False}
        answer = chat(**{**same, "messages": messages}, extra_body=extra)
        return answer.choices[0].finish_reason, answer.usage.completion_tokens == 12

    def models() -> tuple[Any, bool]:
        names = [one.id for one in client.models.list()]
        return names, names == ["small"] and client.models.retrieve("small").id == "small"

    def other_model() -> tuple[Any, bool]:
        try:
            client.models.retrieve("other")
        except openai.NotFoundError as refusal:
            return f"404: {refusal.body['message']}", True  # type: ignore[index]
        return "found", False

    table.check("openai", "chat, twice with one seed", sync)
    table.check("openai", "chat, streamed, with usage", stream)
    table.check("openai (async)", "chat", asynchronous)
    table.check("openai (async)", "512 chats at once, the SDK's defaults", many)
    table.check("openai", "8 streams of 900 tokens closed after their first", disconnects)
    table.check("openai", "tools, tool_choice required", required_tool)
    table.check("openai", "tools, one function required, streamed", streamed_tool)
    table.check("openai", "a tool's result in the messages", tool_conversation)
    table.check("openai", "response_format json_schema", schema)
    table.check("openai", "response_format json_object", any_json)
    table.check("openai", "a schema that can't be compiled", bad_schema)
    table.check("openai", "a key nobody knows", unknown)
    table.check("openai", "chat with logprobs, top_logprobs 3", probabilities)
    table.check("openai", "completion, echo, logprobs, max_tokens 0", echo)
    table.check("openai", "2 prompts, n 2, stop", several)
    table.check("openai", "penalties, logit_bias, min_p, top_k -1, ignore_eos, developer, metadata", sampling)
    table.check("openai", "continue_final_message", continued)
    table.check("openai", "models.list, models.retrieve", models)
    table.check("openai", "models.retrieve of another model", other_model)


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
        answer = litellm.text_completion(
            model="text-completion-openai/small", api_base=server.url, api_key="none", prompt="a", max_tokens=5
        )
        return answer.choices[0].finish_reason, answer.usage.completion_tokens <= 5

    table.check("litellm", "chat", plain)
    table.check("litellm", "chat, streamed", stream)
    table.check("litellm", "tools, tool_choice required", tool)
    table.check("litellm", "response_format json_schema", schema)
    table.check("litellm", "chat as hosted_vllm, top_k 5", vllm_provider)
    table.check("litellm", "text_completion", text)


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

    def evaluate(kind: str, arguments: str, task: str) -> tuple[float, list[Any]]:
        out = place / f"{kind}-{task}"
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
        command += ["--include_path", str(place), "--output_path", str(out), "--device", "cpu", "--batch_size", "1"]
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
    local = f"pretrained={folder},dtype=float32"

    def compared(task: str) -> tuple[Any, bool]:
        value, answers = evaluate("local-completions", api, task)
        wanted, own = evaluate("hf", local, task)
        flat = [(_leaf(a), _leaf(b)) for a, b in zip(answers, own, strict=True)]
        is_same = all(len(a) == len(b) and all(_agree(x, y) for x, y in zip(a, b, strict=True)) for a, b in flat)
        return f"{len(answers)} rows, {value:.4f} (hf: {wanted:.4f})", math.isclose(
            value, wanted, rel_tol=1e-3
        ) and is_same

    table.check("lm_eval", "multiple_choice (loglikelihood), as lm_eval's hf model", lambda: compared("choose"))
    table.check("lm_eval", "loglikelihood_rolling, as lm_eval's hf model", lambda: compared("rolling"))
    table.check("lm_eval", "generate_until, as lm_eval's hf model", lambda: compared("write"))


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
    parser.add_argument("--out", default="", help="write the table here as Markdown")
    options = parser.parse_args()
    table, failed = Table(), False
    with tempfile.TemporaryDirectory(prefix="openai-clients-") as name:
        place = Path(name)
        folder = make_model(place)
        server = Server(folder)
        try:
            with_openai(table, server)
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
