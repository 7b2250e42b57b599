"""`stoker serve`: a real server, asked over HTTP; its answers are the engine's, and bad input gets one clear sentence."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

import torch

from conftest import at_length, wait_for
from devices import needs_gpu
from stoker.cli import serve
from stoker.contract.errors import Refusal
from stoker.training.data.learn import train
from stoker.training.model import hf
from stoker.training.model.config import ModelConfig
from stoker.training.model.decoder import Decoder
from stoker.training.rl.server_match import own_logprobs, served_logprobs
from stoker.training.serve.batch import BatchEngine
from stoker.training.tokenizer import chat
from stoker.training.tokenizer.tokenizer import Tokenizer, load

TEXTS = ["the quick brown fox jumps over the lazy dog\n", "she sells sea shells by the sea shore → é\n"] * 3
CONTEXT = 256


class Server:
    def __init__(
        self, folder: Path, *flags: str, argv: Sequence[str] = ("-m", "stoker", "serve"), **variables: str
    ) -> None:
        argv = [sys.executable, *argv, str(folder), "--port", "0", "--context", str(CONTEXT), *flags]
        # Answers are compared with those in fp32, which a CPU gives; test_serve_kernel.py is about GPUs.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **variables}
        self.process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("http://"), (line, self.process.stderr and self.process.stderr.read())
        self.port = int(line.split()[0].split(":")[2].split("/")[0])

    def ask(self, path: str, body: Any = None, key: str = "", **headers: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        given = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {}), **headers}
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.request("GET" if body is None else "POST", path, data, given)
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        is_json = answer.headers["Content-Type"].startswith("application/json")
        return answer.status, json.loads(text) if is_json else text.decode()

    def numbers(self) -> dict[str, float]:
        lines = self.ask("/metrics")[1].splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    def is_idle(self) -> bool:
        numbers = self.numbers()
        return not any(numbers[f"stoker_serve_{name}"] for name in ("running", "waiting", "blocks_held"))

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        """Ctrl-C ends it, and not a traceback."""
        self.process.send_signal(signal.SIGINT)
        try:
            _, errors = self.process.communicate(timeout=60)
        finally:
            self.process.kill()
        assert self.process.returncode == 0 and "Traceback" not in errors, errors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    words = train(TEXTS, 300, str(folder / "tokenizer"))
    shape = ModelConfig(
        layers=2, dim=32, heads=4, kv_heads=2, head_dim=8, ff=48, vocab_size=words.vocab_size, qk_norm=True, init_std=0.3
    )  # fmt: skip
    made = Decoder(shape, CONTEXT)
    made.start(5)
    hf.save(made, str(folder / "hf"), say=lambda _: None, tokenizer_folder=str(folder / "tokenizer"))
    return folder / "hf"


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with Server(folder, "--name", "small", "--slots", "4", "--queue", "4", "--memory", "512") as started:
        yield started


@pytest.fixture(scope="module")
def alone(folder: Path) -> tuple[BatchEngine, Tokenizer]:
    model = hf.opened(str(folder), CONTEXT, torch.float32, torch.device("cpu"), lambda _: None)
    words = load(str(folder))
    return BatchEngine(model, rows=1, length=CONTEXT, vocab=words.vocab_size), words


def pieces(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_completion_is_the_engines_whole_or_in_pieces(server: Server, alone: tuple[BatchEngine, Tokenizer]) -> None:
    engine, words = alone
    ids = [*words.start, *words.encode("she sells")]
    (want,) = engine.generate([ids], new_tokens=20, stop={words.end_id}, temperature=0)
    body = {"model": "small", "prompt": "she sells", "max_tokens": 20, "temperature": 0, "return_token_ids": True}
    status, whole = server.ask("/v1/completions", body)
    (choice,) = whole["choices"]
    assert status == 200 and choice["token_ids"] == want and choice["prompt_token_ids"] == ids
    assert whole["usage"] == {
        "prompt_tokens": len(ids),
        "completion_tokens": len(want),
        "total_tokens": len(ids) + len(want),
    }
    assert choice["finish_reason"] == ("stop" if want[-1] == words.end_id else "length")
    marks = set(words.special.values())
    assert choice["text"] == words.decode_bytes([one for one in want if one not in marks]).decode("utf-8", "replace")
    _, again = server.ask("/v1/completions", {**body, "prompt": ids})
    assert again["choices"][0]["text"] == choice["text"], "token ids are a prompt, too"
    _, text = server.ask("/v1/completions", {**body, "stream": True, "stream_options": {"include_usage": True}})
    *parts, last = pieces(text)
    assert "".join(part["choices"][0]["text"] for part in parts) == choice["text"]
    assert [one for part in parts for one in part["choices"][0]["token_ids"]] == want
    assert last["usage"] == whole["usage"] and not last["choices"]
    stop = re.findall("[ -~]{2,}", choice["text"])[-1]
    _, cut = server.ask("/v1/completions", {**body, "stop": [stop]})
    assert cut["choices"][0]["text"] == choice["text"][: choice["text"].index(stop)]
    assert cut["choices"][0]["finish_reason"] == "stop"


def test_an_echo_has_the_prompt_and_how_likely_its_tokens_are(server: Server, folder: Path) -> None:
    model = hf.opened(str(folder), CONTEXT, torch.float32, torch.device("cpu"), lambda _: None)
    ids = load(str(folder)).encode("she sells sea shells")
    own = own_logprobs(model, ids)
    for name in ("small", ""):
        assert served_logprobs(f"127.0.0.1:{server.port}", name, ids) == pytest.approx(own, abs=1e-4)
    body = {"prompt": "she sells", "max_tokens": 5, "temperature": 0}
    plain, echoed = (
        server.ask("/v1/completions", {**body, "echo": echo, "logprobs": 1})[1]["choices"][0] for echo in (False, True)
    )
    assert echoed["text"].endswith("she sells" + plain["text"])
    ours, more = plain["logprobs"], echoed["logprobs"]
    count = len(more["tokens"]) - len(ours["tokens"])
    assert count > 1 and more["tokens"][count:] == ours["tokens"] and more["token_logprobs"][0] is None
    assert len(more["token_logprobs"]) == len(more["top_logprobs"]) == len(more["tokens"])
    streamed = pieces(server.ask("/v1/completions", {**body, "echo": True, "stream": True})[1])
    assert "".join(piece["choices"][0]["text"] for piece in streamed) == echoed["text"]


def test_a_chat_has_seeds_several_answers_and_log_probabilities(
    server: Server, alone: tuple[BatchEngine, Tokenizer]
) -> None:
    engine, words = alone
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    body = {"messages": messages, "n": 3, "seed": 11, "max_tokens": 12, "logprobs": True, "top_logprobs": 2}
    status, whole = server.ask("/v1/chat/completions", {**body, "return_token_ids": True})
    assert status == 200 and [one["index"] for one in whole["choices"]] == [0, 1, 2]
    prompt = chat.prompt(words, [("system", b"be brief"), ("user", b"hi")])
    for choice in whole["choices"]:
        (want,) = engine.generate([prompt], new_tokens=12, stop=words.stop_ids, seed=11, indexes=[choice["index"]])
        assert choice["token_ids"] == want and choice["message"]["role"] == "assistant"
        entries = choice["logprobs"]["content"]
        assert len(entries) == len(want) and all(len(entry["top_logprobs"]) == 2 for entry in entries)
        assert bytes(byte for entry in entries for byte in entry["bytes"]) == words.decode_bytes(want)
        assert all(entry["logprob"] <= entry["top_logprobs"][0]["logprob"] <= 0 for entry in entries)
    _, text = server.ask("/v1/chat/completions", {**body, "stream": True})
    streamed = {index: "" for index in range(3)}
    for part in pieces(text):
        (choice,) = part["choices"]
        streamed[choice["index"]] += choice["delta"]["content"]
    assert streamed == {choice["index"]: choice["message"]["content"] for choice in whole["choices"]}


BAD: tuple[tuple[Any, int, str], ...] = (
    (b"{", 400, "not JSON"), (b"\xff", 400, "not JSON"), ([], 400, "JSON object"), (b"[" * 200_000, 400, "nested"),
    ({"prompt": "x", "model": "other"}, 404, "this server has small"), ({}, 400, "prompt"), ({"prompt": [1.5]}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"), ({"prompt": [10**9]}, 400, "token ids"), ({"prompt": [-1]}, 400, "token ids"),
    ({"prompt": "x", "temprature": 1}, 400, "did you mean"), ({"prompt": "x", "temperature": "hot"}, 400, "temperature"),
    ({"prompt": "x", "temperature": -1}, 400, "temperature"), ({"prompt": "x", "temperature": 1e300}, 400, "0.001 to 1000"), ({"prompt": "x", "top_p": 0}, 400, "top_p"),
    ({"prompt": "x", "n": 0}, 400, "n must be a whole number from 1 to 128, not 0"), ({"prompt": "x", "n": 10**6}, 400, "not 1000000"), ({"prompt": "x", "n": 9}, 400, "8 at a time"),
    ({"prompt": "x", "max_tokens": 10**6}, 400, "max_tokens"), ({"prompt": "x", "max_tokens": True}, 400, "max_tokens"),
    ({"prompt": "the " * 400}, 400, "tokens"), ({"prompt": "x", "stop": [""]}, 400, "stop"), ({"prompt": "x", "stop": 5}, 400, "stop"),
    ({"prompt": "x", "logprobs": 99}, 400, "logprobs"), ({"prompt": "x", "presence_penalty": 3}, 400, "presence_penalty must be from -2 to 2"),
    ({"prompt": "x", "logit_bias": {"x": 1}}, 400, "token ids"), ({"prompt": "x", "logit_bias": {"99999": 1}}, 400, "token ids"), ({"prompt": "x", "logit_bias": {"5": 101}}, 400, "logit_bias"),
    ({"prompt": "x", "logit_bias": [5]}, 400, "logit_bias"), ({"prompt": "x", "repetition_penalty": 0}, 400, "repetition_penalty"), ({"prompt": "x", "min_p": 2}, 400, "min_p"),
    ({"prompt": "x", "top_k": -2}, 400, "top_k"), ({"prompt": "x", "max_tokens": -1}, 400, "max_tokens"), ({"prompt": "x", "ignore_eos": 1}, 400, "ignore_eos"),
    ({"prompt": "x", "prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs"),
    ({"prompt": "x", "stream": "yes"}, 400, "stream"), ({"prompt": "x", "seed": 1.5}, 400, "seed"),
    (b'{"prompt": "x", "temperature": NaN}', 400, "temperature"), (b" " * (2 << 20), 413, ""),
)  # fmt: skip


def test_bad_input_gets_the_status_and_one_sentence_and_the_server_stays_up(server: Server) -> None:
    for body, status, words in BAD:
        found, told = server.ask("/v1/completions", body)
        line = told["error"]["message"] if isinstance(told, dict) else told
        assert found == status and words in line and "Traceback" not in line and "\n" not in line.strip(), (
            body,
            found,
            told,
        )
    for messages in (
        [],
        [{"role": "user"}],
        [{"role": "king", "content": "x"}],
        [{"role": "assistant", "content": "x"}],
        "x",
        [5],
    ):
        assert server.ask("/v1/chat/completions", {"messages": messages})[0] == 400, messages
    good = {"prompt": "x", "max_tokens": 2}
    for (path, body, headers), status in (
        (("/v1/nothing", None, {}), 404), (("/v1/completions", None, {}), 405), (("/health", good, {}), 405),
        (("/v1/completions", good, {"Content-Type": "text/plain"}), 415),
        (("/v1/completions", good, {"Host": "elsewhere.example"}), 403),
        (("/v1/completions", good, {"Origin": "https://elsewhere.example"}), 403),
        (("/v1/completions", good, {"Origin": "null"}), 403),
        (("/v1/models/other", None, {}), 404), (("/tokenize", {}, {}), 400), (("/detokenize", {"tokens": [-1]}, {}), 400),
    ):  # fmt: skip
        found, told = server.ask(path, body, **headers)
        assert found == status and told["error"]["message"], (path, found, told)
    assert server.ask("/health") == (200, {"status": "ok"})
    assert server.ask("/v1/models")[1]["data"][0]["id"] == "small"
    assert server.ask("/v1/completions", good)[0] == 200 and wait_for(lambda: server.is_idle() or None, 60)


def test_a_full_queue_turns_away_and_who_leaves_makes_room(server: Server) -> None:
    long = json.dumps({"prompt": "the", "max_tokens": 240, "n": 8, "stream": True, "stop_token_ids": []}).encode()
    before = server.numbers()['stoker_serve_answers_total{finish="abort"}']
    turned_away = 0
    for _ in range(30):  # on a busy machine the long answers may be written before the other request is looked at
        client = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(long)}\r\n\r\n"
        client.sendall(head.encode() + long)
        assert client.recv(100).startswith(b"HTTP/1.1 200")
        status, told = server.ask("/v1/completions", {"prompt": "x", "max_tokens": 2})
        assert status == 200 or (status == 429 and "try again" in told["error"]["message"])
        turned_away += status == 429
        client.close()
        assert wait_for(lambda: server.is_idle() or None, 60)
        if turned_away == 3:
            break
    assert turned_away == 3
    assert server.numbers()['stoker_serve_answers_total{finish="abort"}'] > before + 10
    assert server.ask("/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200


def test_clients_at_the_same_time_get_the_answers_they_would_get_alone(server: Server) -> None:
    bodies = [{"prompt": f"{'the quick ' * (n % 5)}{n}", "max_tokens": 5 + n % 9, "seed": n} for n in range(24)]
    alone = [server.ask("/v1/completions", body)[1]["choices"][0]["text"] for body in bodies]
    found: dict[int, str] = {}

    def client(number: int) -> None:
        while True:
            status, told = server.ask("/v1/completions", bodies[number])
            if status == 200:
                found[number] = told["choices"][0]["text"]
                return
            assert status == 429

    threads = [threading.Thread(target=client, args=(number,)) for number in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(len(bodies))] == alone and len(set(alone)) > 15


def test_beyond_this_machine_a_key_is_needed_and_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(serve.API_KEY, raising=False)
    with pytest.raises(Refusal, match="needs an API key"):
        serve.main([str(folder), "--host", "0.0.0.0", "--port", "0"])
    with pytest.raises(Refusal, match="--slots must be at least 1"):
        serve.main([str(folder), "--slots", "0"])


@at_length
def test_a_key_keeps_others_out(folder: Path) -> None:
    with Server(folder, "--host", "0.0.0.0", STOKER_API_KEY="geheim-ß") as server:
        good = {"prompt": "x", "max_tokens": 2}
        for path, body in (("/v1/completions", good), ("/v1/models", None), ("/metrics", None)):
            for key in ("", "wrong", "geheim", "geheim-\xdf"):
                assert server.ask(path, body, key)[0] == 401
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("GET", "/v1/models", headers={"Authorization": "Bearer geheim-ß".encode()})
        assert connection.getresponse().status == 200
        assert server.ask("/health")[0] == 200, "whoever starts it looks whether it lives"


def test_the_openai_client_reads_it(server: Server) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["small"]
    asked: dict[str, Any] = {
        "model": "small",
        "messages": [{"role": "user", "content": "hi"}],
        "seed": 3,
        "max_tokens": 9,
    }
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=1)
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    streamed = client.chat.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content for chunk in streamed) == whole.choices[0].message.content
    text = client.completions.create(model="small", prompt="the", max_tokens=4, n=2, logprobs=1)
    assert [choice.index for choice in text.choices] == [0, 1] and len(text.choices[0].logprobs.tokens) <= 4
    with pytest.raises(openai.NotFoundError, match="this server has small"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model="small", prompt="x", max_tokens=10**6)


@needs_gpu
def test_on_a_gpu_the_first_answer_is_that_of_all_later_ones(folder: Path) -> None:
    """The first request of its kind captures a CUDA graph, which must not advance its answer."""
    body = {"prompt": "the", "max_tokens": 24, "temperature": 0}
    with Server(folder, "--slots", "2", CUDA_VISIBLE_DEVICES="0") as server:
        texts = [server.ask("/v1/completions", body)[1]["choices"][0]["text"] for _ in range(3)]
    assert texts[0] and len(set(texts)) == 1
