"""`stoker serve` as an HTTP server: connections, streams that are cut, a full queue, and how SIGTERM ends it."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from conftest import wait_for
from test_serve import Server, folder, pieces  # noqa: F401

JSON = {"Content-Type": "application/json"}
SHORT = {"prompt": "x", "max_tokens": 2}
LONG = {"prompt": "the", "max_tokens": 240, "n": 16, "stream": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:  # noqa: F811
    with Server(folder, "--name", "small", "--slots", "4", "--queue", "512") as started:
        yield started


class Stream:
    """A response that is read as it comes."""

    def __init__(self, server: Server, body: dict[str, Any]) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
        self._connection.request("POST", "/v1/completions", json.dumps(body), JSON)
        self.response = self._connection.getresponse()
        assert self.response.status == 200
        self.begun = self.response.readline()

    def rest(self) -> str:
        return (self.begun + self.response.read()).decode()


def ended(server: Server, signum: int) -> int:
    server.process.send_signal(signum)
    try:
        return server.process.wait(timeout=60)
    finally:
        server.process.kill()


def test_a_connection_serves_several_requests(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.connect()
    own = connection.sock
    for path, body, status in (
        ("/v1/completions", SHORT, 200), ("/v1/models", None, 200), ("/v1/completions", {}, 400), ("/nothing", None, 404),
        ("/v1/completions", {**SHORT, "stream": True}, 200), ("/v1/completions", SHORT, 200),
    ):  # fmt: skip
        connection.request("GET" if body is None else "POST", path, body and json.dumps(body), JSON)
        response = connection.getresponse()
        response.read()
        assert response.status == status and connection.sock is own
    connection.close()


def test_streams_are_chunked_and_a_body_may_be(server: Server) -> None:
    stream = Stream(server, {**SHORT, "stream": True})
    assert stream.response.headers["Transfer-Encoding"] == "chunked" and pieces(stream.rest())
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", "/v1/completions", iter([b'{"prompt": "x", ', b'"max_tokens": 2}']), JSON)
    assert connection.getresponse().status == 200
    connection.close()


def test_a_stream_that_is_cut_raises_in_its_client(folder: Path) -> None:  # noqa: F811
    server = Server(folder, "--slots", "1")
    stream = Stream(server, LONG)
    assert ended(server, signal.SIGKILL) == -signal.SIGKILL
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        stream.rest()


def test_a_stream_that_is_cut_raises_in_the_sdk(folder: Path) -> None:  # noqa: F811
    openai = pytest.importorskip("openai")
    server = Server(folder, "--name", "small", "--slots", "1")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    stream = client.completions.create(model="small", prompt="the", max_tokens=240, n=16, stream=True, seed=1)
    next(iter(stream))
    assert ended(server, signal.SIGKILL) == -signal.SIGKILL
    with pytest.raises(openai.APIConnectionError):
        list(stream)


def test_sigterm_finishes_what_runs_and_turns_new_requests_away(folder: Path) -> None:  # noqa: F811
    server = Server(folder, "--slots", "2", "--grace", "10m")
    stream = Stream(server, LONG)
    server.process.send_signal(signal.SIGTERM)

    def turned_away() -> tuple[int, Any] | None:
        status, told = server.ask("/v1/completions", SHORT)
        return (status, told) if status != 200 else None

    status, told = wait_for(turned_away, 30)
    assert status == 503 and told["error"]["type"] == "server_error" and server.ask("/health")[0] == 503
    parts = pieces(stream.rest())
    finished = [part["choices"][0]["finish_reason"] for part in parts if part["choices"][0]["finish_reason"]]
    assert finished == ["length"] * LONG["n"]
    assert server.process.wait(timeout=60) == 0


def test_after_the_grace_what_still_runs_is_cut(folder: Path) -> None:  # noqa: F811
    server = Server(folder, "--slots", "1", "--grace", "0.2s")
    stream = Stream(server, {**LONG, "n": 128})
    assert ended(server, signal.SIGTERM) == 0
    with pytest.raises(http.client.IncompleteRead):
        stream.rest()


def test_a_second_signal_does_not_wait(folder: Path) -> None:  # noqa: F811
    server = Server(folder, "--slots", "1", "--grace", "10m")
    stream = Stream(server, {**LONG, "n": 128})
    server.process.send_signal(signal.SIGTERM)
    wait_for(lambda: server.ask("/health")[0] == 503 or None, 30)
    assert ended(server, signal.SIGINT) == 0
    with pytest.raises(http.client.IncompleteRead):
        stream.rest()


def test_an_idle_server_ends_without_delay(folder: Path) -> None:  # noqa: F811
    server = Server(folder, "--grace", "10m")
    idle = socket.create_connection(("127.0.0.1", server.port))
    assert ended(server, signal.SIGTERM) == 0
    idle.close()


def test_when_the_engine_fails_clients_hear_of_it_and_the_server_ends(folder: Path) -> None:  # noqa: F811
    code = """
import sys
from stoker.cli import serve
from stoker.contract.errors import Refusal
from stoker.training.serve.engine import PagedEngine
step = PagedEngine.step
def failing(engine):
    if engine.count > 30:
        raise RuntimeError("broken")
    return step(engine)
PagedEngine.step = failing
try:
    serve.main(sys.argv[1:])
except Refusal as refusal:
    print(refusal.line, file=sys.stderr)
    sys.exit(refusal.code)
"""
    server = Server(folder, "--slots", "64", argv=("-c", code))
    stream, found = Stream(server, {**LONG, "n": 28}), []
    whole = {**LONG, "n": 1, "stream": False}
    waiting = threading.Thread(target=lambda: found.append(server.ask("/v1/completions", {**whole, "n": 20})))
    waiting.start()
    with pytest.raises(http.client.IncompleteRead) as caught:
        stream.rest()
    waiting.join()
    (status, told), lines = found[0], caught.value.partial.decode().strip().split("\n\n")
    assert status == 500 and told["error"]["type"] == "server_error"
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["type"] == "server_error"
    _, errors = server.process.communicate(timeout=60)
    assert server.process.returncode == 70 and "broken" in errors and "Traceback" not in errors


def test_as_many_requests_as_the_queue_admits_are_all_answered(server: Server) -> None:
    openai = pytest.importorskip("openai")

    async def ask() -> list[Any]:
        # The SDK gives a connection 5 s by default, which on a busy machine its own 512 tasks can use up before they run.
        address = f"http://127.0.0.1:{server.port}/v1"
        async with openai.AsyncOpenAI(base_url=address, api_key="none", timeout=600) as client:
            prompts = [f"the {number}" for number in range(512)]
            return await asyncio.gather(
                *(client.completions.create(model="small", prompt=one, max_tokens=4, seed=1) for one in prompts),
                return_exceptions=True,
            )

    answers = asyncio.run(ask())
    assert [answer for answer in answers if isinstance(answer, Exception)] == []
    assert all(answer.choices[0].finish_reason for answer in answers)
    assert server.numbers()["stoker_serve_turned_away_total"] == 0


def test_beyond_the_queue_a_client_is_told_when_to_come_again(folder: Path) -> None:  # noqa: F811
    with Server(folder, "--slots", "1", "--queue", "2") as server:
        streams = [Stream(server, {**LONG, "n": 3})]
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps(SHORT), JSON)
        response = connection.getresponse()
        told = json.loads(response.read())["error"]
        assert response.status == 429 and int(response.headers["Retry-After"]) > 0
        assert (told["type"], told["code"], told["param"]) == ("rate_limit_error", "rate_limit_exceeded", None)
        found: list[int] = []
        waiting = threading.Thread(target=lambda: found.append(len(streams[0].rest())))
        waiting.start()
        waiting.join()
        connection.request("POST", "/v1/completions", json.dumps(SHORT), JSON)
        assert connection.getresponse().status == 200


def test_a_large_answer_reaches_a_client_that_reads_slowly(server: Server) -> None:
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 200,
        "n": 8,
        "logprobs": True,
        "top_logprobs": 20,
    }
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    connection.connect()
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.request("POST", "/v1/chat/completions", json.dumps({**body, "ignore_eos": True}), JSON)
    response = connection.getresponse()
    assert wait_for(lambda: server.is_idle() or None, 60)
    data = response.read()
    entries = [entry for choice in json.loads(data)["choices"] for entry in choice["logprobs"]["content"]]
    assert len(data) > 1 << 20 and len(entries) == 1600 and all(len(entry["top_logprobs"]) == 20 for entry in entries)


def test_without_the_http_library_it_is_named(folder: Path, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "uvicorn.py").write_text("raise ModuleNotFoundError(\"No module named 'uvicorn'\", name='uvicorn')\n")
    command = [sys.executable, "-P", "-m", "stoker", "serve", str(folder), "--port", "0"]
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 69 and "needs the package uvicorn" in done.stderr.splitlines()[-1], done.stderr


def test_errors_have_openais_form(server: Server) -> None:
    for path, body, status, want in (
        ("/v1/completions", {"prompt": "x", "model": "other"}, 404, ("invalid_request_error", "model", "model_not_found")),
        ("/v1/completions", {"prompt": "x", "temperature": "hot"}, 400, ("invalid_request_error", "temperature", None)),
        ("/v1/completions", {"prompt": "the " * 400}, 400, ("invalid_request_error", "prompt", "context_length_exceeded")),
        ("/v1/nothing", None, 404, ("invalid_request_error", None, None)),
    ):  # fmt: skip
        found, told = server.ask(path, body)
        assert found == status and set(told) == {"error"}
        assert (told["error"]["type"], told["error"]["param"], told["error"]["code"]) == want
