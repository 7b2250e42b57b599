"""What the nineteenth review found: the history of another user's run played back, and bodies and answers of `stoker serve`."""

from __future__ import annotations

import json
import os
import queue
import resource
import sys
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from conftest import Stoker
from localuser import ATTACKER, needs_root
from security.test_viewers import make_run, members, moment
from stoker.control.record import history, reader
from stoker.control.show import serving
from stoker.control.show.top.player import Replay
from stoker.training.serve import api
from stoker.training.serve.front import Front


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (5, 5))  # seconds of CPU time, of a command that takes half of one


def test_a_replay_reads_no_more_of_anothers_history_than_other_viewers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_root()
    monkeypatch.setattr(history, "MOST_OF_OTHERS", 10_000)
    lines = [line for n in range(1000) for line in (members(hosts=["h"]), moment(1e9 + n))]
    counts = {}
    for owner in (os.getuid(), ATTACKER):
        folder = make_run(tmp_path, f"run-{owner}", history=lines, owner=owner)
        older = folder / "history" / "minutes.jsonl"
        older.write_bytes((folder / "history" / "seconds.jsonl").read_bytes().replace(b"100000", b" 99990"))
        run = reader.read(str(folder))
        assert run is not None
        counts[owner] = len(Replay(run).moments)
    size = len((tmp_path / f"run-{ATTACKER}" / "history" / "seconds.jsonl").read_bytes()) / 1000
    assert counts[os.getuid()] == 2000
    assert 0 < counts[ATTACKER] <= 10_000 / size


def test_a_replay_finds_cards_without_looking_at_each(stoker: Stoker) -> None:
    """The last moment's 512 cards are none of the 16,000 of the 59 before it: 500 million comparisons a picture."""
    needs_root()
    gpus = {name: [(f"h{n % 64}", f"GPU-{name}{n}") for n in range(16_000)] for name in "ab"}
    hosts = [f"h{n}" for n in range(64)]
    lines = [members(gpus=gpus["a"], hosts=hosts), *(moment(1e9 + n) for n in range(59))]
    lines += [members(gpus=gpus["b"], hosts=hosts), moment(1e9 + 60)]
    folder = make_run(stoker.cwd / "runs", "theirs", history=lines, owner=ATTACKER)
    done = stoker("top", "--replay", str(folder), "--once", preexec_fn=limited)
    assert done.code == 0 and "theirs" in done.out, (done.code, done.err)


# ---- stoker serve ----


class Pipes:
    """Carries nothing; `gone`: what to call where a client leaves."""

    def __init__(self) -> None:
        self.gone: list[Callable[[], None]] = []
        self.said: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def pipe(self, gone: Callable[[], None]) -> Pipes:
        self.gone.append(gone)
        return self

    def push(self, data: bytes) -> None:
        self.said.put(data)

    def end(self) -> None:
        pass

    def to_bytes(self, status: int, body: bytes, _type: str, _headers: object) -> bytes:
        return body


def test_bodies_of_clients_that_left_are_neither_kept_nor_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sent a megabyte again and again and left made everybody else wait for minutes, and the server hold all of it."""
    bodies: list[bytes] = []

    def read(body: bytes, *_: object) -> None:
        bodies.append(body)
        raise api.Problem("seen")

    monkeypatch.setattr(api, "read", read)
    pipes, driver = Pipes(), SimpleNamespace(failure="", most=1)
    front = Front(None, driver, pipes)  # type: ignore[arg-type]
    theirs, headers = b"x" * (1 << 20), {"content-type": "application/json"}
    held = sys.getrefcount(theirs)
    for _ in range(50):
        front.answer(serving.Request("POST", "/v1/completions", {}, headers, theirs))
    for leave in pipes.gone:
        leave()
    assert sys.getrefcount(theirs) == held
    front.answer(serving.Request("POST", "/v1/completions", {}, headers, b"ours"))
    front.start()
    assert b"seen" in pipes.said.get(timeout=60)
    front.stop()
    assert bodies == [b"ours"]


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


def test_a_large_answer_reaches_who_waits_for_it() -> None:
    """One of 4,096 tokens with 20 alternatives each has 6 MB: its client was closed as one that reads too slowly."""
    data = b"x" * (3 * serving.MOST_PENDING)

    def answer(_: serving.Request) -> serving.Stream:
        stream = serving.Stream("text/plain", (), lambda: None)
        stream.push(data)
        stream.end()
        return stream

    listening = serving.listen("127.0.0.1", 0)
    over = threading.Event()
    thread = threading.Thread(target=serving.Server(listening, answer).serve, args=(over.is_set, 0.05))
    thread.start()
    try:
        with urllib.request.urlopen(serving.url(listening, "/"), timeout=60) as told:
            assert told.read() == data
    finally:
        over.set()
        thread.join()
