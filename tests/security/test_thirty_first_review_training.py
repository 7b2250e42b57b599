"""What the thirty-first review found in the training plane."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import pytest

from asgi import Exchange


# ---- answers whose tokens are long ----


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("tokenizers")
    from stoker.training.data.learn import train
    from stoker.training.serve import api

    folder = tmp_path_factory.mktemp("words")
    return api.Served("m", train([" " * 128 + "x\n"] * 30, 400, str(folder)), 1 << 15)


class Engine:
    """Writes the same token for ever, with alternatives as long as itself."""

    most, failure = 80, ""

    def __init__(self, token: int) -> None:
        self.token, self.written, self.is_over = token, 0, False

    def reserve(self, count: int) -> bool:
        return True

    def abort(self, requests: Any) -> None:
        self.is_over = True

    def send(self, requests: Any, sink: Any, failed: Any) -> None:
        threading.Thread(target=self._write, args=(requests, sink)).start()

    def _write(self, requests: Any, sink: Any) -> None:
        from stoker.training.serve.request import LENGTH, Event

        for request in requests:
            others = tuple((self.token, -1.0) for _ in range(request.logprobs))
            for place in range(request.new_tokens):
                if self.is_over:
                    return
                self.written += 1
                finish = LENGTH if place + 1 == request.new_tokens else ""
                sink(Event(request.id, self.token, 0, "", -1.0, others, finish))
                time.sleep(0.005)


def answered(served: Any, token: int, is_chat: bool = True, **body: Any) -> tuple[Exchange, Engine]:
    from stoker.training.serve.api import Problem
    from stoker.training.serve.front import App

    async def run() -> tuple[Exchange, Engine]:
        engine = Engine(token)
        app = App(served, engine)
        app.calls.open(asyncio.get_running_loop())
        asked = {"messages": [{"role": "user", "content": "a"}]} if is_chat else {"prompt": "a"}
        data, path = json.dumps({**asked, **body}).encode(), "/v1/chat/completions" if is_chat else "/v1/completions"
        exchange = Exchange(path, data)
        try:
            await exchange.run(app)
        except Problem:
            assert exchange.status == 200, "a stream that has begun is cut"
        return exchange, engine

    return asyncio.run(run())


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousandth of what answers may say in any case, as these tokens have 128 characters, and not 4,096 bytes."""
    from stoker.training.serve import api

    monkeypatch.setattr(api, "MOST_SAID", 1 << 12, raising=False)
    monkeypatch.setattr(api, "SAID_A_TOKEN", 100, raising=False)


@pytest.mark.usefixtures("little")
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_with_log_probabilities_of_long_tokens_ends(served: Any, stream: bool) -> None:
    """A stranger's model of 332 KB writes tokens of 4 KB: one chat with 20 alternatives a token took 6.3 GB, and went on."""
    longest = int(served.tokenizer.lengths.argmax())
    assert served.tokenizer.lengths[longest] > 100
    asked: dict[str, Any] = {"max_tokens": 200, "logprobs": True, "top_logprobs": 20, "stream": stream}
    exchange, engine = answered(served, longest, **asked)
    assert b"too long" in exchange.body and engine.is_over and engine.written < 150
    assert exchange.status == (200 if stream else 400)
    exchange, engine = answered(served, 65, **asked)
    assert exchange.status == 200 and engine.written == 200 and not engine.is_over


@pytest.mark.usefixtures("little")
def test_answers_of_long_tokens_together_end(served: Any) -> None:
    longest = int(served.tokenizer.lengths.argmax())
    asked: dict[str, Any] = {"max_tokens": 50, "n": 16}
    exchange, engine = answered(served, longest, is_chat=False, **asked)
    assert exchange.status == 400 and b"too long" in exchange.body and engine.written < 800
    exchange, engine = answered(served, longest, is_chat=False, **{**asked, "n": 1})
    assert exchange.status == 200 and engine.written == 50
