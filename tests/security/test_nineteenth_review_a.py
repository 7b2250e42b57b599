"""What the nineteenth review found: the history of another user's run played back, and bodies and answers of `stoker serve`."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from asgi import Exchange
from stoker.training.serve import api
from stoker.training.serve.front import App

# ---- stoker serve ----


def test_bodies_of_clients_that_left_are_neither_kept_nor_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sent a megabyte again and again and left made everybody else wait for minutes, and the server hold all of it."""
    bodies: list[bytes] = []
    is_parsing, may_go_on = threading.Event(), threading.Event()

    def read(body: bytes, *_: object) -> None:
        bodies.append(body)
        is_parsing.set()
        may_go_on.wait(60)
        raise api.Problem("seen")

    async def clients() -> None:
        app = App(None, SimpleNamespace(failure="", most=1))  # type: ignore[arg-type]
        slow, ours = (Exchange("/v1/completions", body) for body in (b"slow", b"ours"))
        running = [asyncio.create_task(slow.run(app))]
        while not is_parsing.is_set():
            await asyncio.sleep(0.01)
        theirs = b"x" * (1 << 20)
        held = sys.getrefcount(theirs)
        left = [Exchange("/v1/completions", theirs) for _ in range(50)]
        running += [asyncio.create_task(exchange.run(app)) for exchange in left]
        await asyncio.sleep(0.1)
        assert sys.getrefcount(theirs) > held
        for exchange in left:
            exchange.leave()
        while sys.getrefcount(theirs) > held:
            await asyncio.sleep(0.01)
        running.append(asyncio.create_task(ours.run(app)))
        may_go_on.set()
        await asyncio.gather(*running)
        assert b"seen" in slow.body and b"seen" in ours.body and not any(exchange.status for exchange in left)

    monkeypatch.setattr(api, "read", read)
    asyncio.run(clients())
    assert bodies == [b"slow", b"ours"]


def test_a_body_asks_for_so_many_logprobs_and_no_more(tmp_path: Path) -> None:
    """40 answers of 4,096 tokens with 20 alternatives each took 2 GB and 28 s, in the engine's own thread."""
    pytest.importorskip("tokenizers")
    from stoker.training.data.learn import train

    served = api.Served("m", train(["the quick brown fox\n"] * 3, 280, str(tmp_path)), 4096)
    body = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 20}
    assert len(api.read(json.dumps(body).encode(), True, served).requests) == 1
    assert len(api.read(json.dumps({**body, "n": 80, "max_tokens": 100}).encode(), True, served).requests) == 80
    assert (
        len(api.read(json.dumps({"prompt": "hi", "n": 80, "max_tokens": 4000}).encode(), False, served).requests) == 80
    )
    with pytest.raises(api.Problem, match="log-probabilities are too many: at most"):
        api.read(json.dumps({**body, "n": 80}).encode(), True, served)
