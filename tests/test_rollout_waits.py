"""How trainers ask servers for completions and wait for them: old weights, lost versions, stops, and servers that can't be reached."""

from __future__ import annotations

import http.server
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from conftest import PATIENCE, at_length_but, wait_for
from forked_ranks import server
from stoker.contract.evidence import Verdict
from stoker.control.roles.blame import is_echo
from stoker.training.model.decoder import Decoder
from stoker.training.parallel.config import ParallelConfig
from stoker.training.parallel.group import Group
from stoker.training.rl.asking import Patient, ServerFailed
from stoker.training.rl.dialects import Published, Wanted
from stoker.training.rl.kept import Kept
from stoker.training.rl.publish import Publisher, To
from stoker.training.rl.remote import OtherWeights, Servers
from stoker.training.rl.sampler import Ask, Written
from stoker.training.rl.waiting import FOR_SERVER, ServerWait, StopRequested
from test_grpo import SHAPE, Forks, Job, model_that_answers_with_a_digit
from test_grpo_server import FORKS, Serving

WANTED = Wanted(4, 1.0, frozenset({0}), 100, 64)
Reply = Callable[[str, dict[str, Any]], tuple[int, dict[str, Any]]]


@contextmanager
def replying(reply: Reply) -> Iterator[str]:
    """HOST:PORT of a server that answers each POST as `reply` says, given the path and the body."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            status, answer = reply(self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    listening = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"127.0.0.1:{listening.server_port}"
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()


@contextmanager
def rollout_client(address: str, staleness: int, **more: Any) -> Iterator[Servers]:
    client = Servers(
        [address], "", WANTED, lambda version: Published(version, f"/version-{version}", f"digest-{version}"),
        staleness=staleness, patience_s=30.0, **more,
    )  # fmt: skip
    try:
        yield client
    finally:
        client.close()


def completions(body: dict[str, Any], versions: list[list[int]]) -> tuple[int, dict[str, Any]]:
    """One for each place; of each its tokens' versions."""
    choices = [
        {
            "index": number, "token_ids": [5 + body["first_index"] + number] * len(row), "versions": row,
            "logprobs": {"token_logprobs": [-1.0] * len(row)},
            "weights": {"version": row[-1], "digest": f"digest-{row[-1]}"},
        }
        for number, row in enumerate(versions)
    ]  # fmt: skip
    return 200, {"choices": choices}


def ask(step: int, places: tuple[int, ...] = (0, 1, 2, 3)) -> Ask:
    return Ask((0, step), 77, ((1, 2),) * len(places), places)


# ---- versions ----


def test_a_completion_with_one_token_of_too_old_weights_is_sampled_again_with_the_same_seed() -> None:
    asked: list[dict[str, Any]] = []

    def reply(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path == "/v1/weights":
            return 200, {}
        asked.append(body)
        if len(asked) == 1:
            return completions(body, [[8, 9], [7, 9], [8, 8], [0, 8, 9]])  # the last token is fine in all
        return completions(body, [[9]] * body["n"])

    with replying(reply) as address, rollout_client(address, staleness=2) as client:
        for version in (8, 9, 10):
            client.refresh(version)
        found = client.take(ask(10))
        assert client.take_resampled() == 2 and client.take_resampled() == 0
    assert [(body["first_index"], body["n"], body["seed"], body["min_weight_version"]) for body in asked] == [
        (0, 4, 77, 8), (1, 1, 77, 8), (3, 1, 77, 8),
    ]  # fmt: skip
    assert [one.versions for one in found] == [(8, 9), (9,), (8, 8), (9,)]
    assert [one.ids[0] for one in found] == [5, 6, 7, 8], "each in its place"


def test_a_server_that_always_answers_with_too_old_weights_ends_the_run() -> None:
    def reply(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return (200, {}) if path == "/v1/weights" else completions(body, [[0, 10]] * body["n"])

    with replying(reply) as address, rollout_client(address, staleness=2) as client:
        for version in (8, 9, 10):
            client.refresh(version)
        with pytest.raises(OtherWeights, match="with other weights than the trainers': version 0 "):
            client.take(ask(10))


def test_completions_that_were_kept_obey_the_bound_too(tmp_path: Path) -> None:
    """The run was resumed with a smaller staleness."""
    before = Kept(str(tmp_path), 0, "")
    before.keep(10, (1, 2), 77, 0, [Written((5,), (-1.0,), (version,)) for version in (10, 9, 8, 10)])

    def reply(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return (200, {}) if path == "/v1/weights" else completions(body, [[10]] * body["n"])

    for staleness, versions in ((2, [10, 9, 8, 10]), (1, [10] * 4)):
        kept = Kept(str(tmp_path), 0, "")
        with replying(reply) as address, rollout_client(address, staleness, kept=kept) as client:
            client.refresh(10)
            found = client.take(ask(10))
            assert [one.versions for one in found] == [(version,) for version in versions]
            assert client.take_resampled() == (4 if staleness == 1 else 0)


def test_a_version_that_is_gone_when_the_server_comes_to_load_it_is_followed_by_the_newest() -> None:
    is_superseded, pushed = threading.Event(), list[int]()

    def reply(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path != "/v1/weights":
            return completions(body, [[max(pushed)]] * body["n"])
        pushed.append(body["version"])
        if body["version"] == 3:
            assert is_superseded.wait(60)
            return 404, {"error": {"message": "/version-3: no such folder"}}
        return 200, {}

    with replying(reply) as address, rollout_client(address, staleness=4) as client:
        client.refresh(3)
        client.begin(ask(3))
        assert wait_for(lambda: pushed or None, 30)
        client.refresh(4)
        is_superseded.set()
        assert {one.versions for one in client.take(ask(3))} == {(4,)}
    assert pushed[:2] == [3, 4]


def test_the_newest_version_that_a_server_does_not_find_ends_the_run_with_its_words() -> None:
    with (
        replying(lambda path, body: (404, {"error": {"message": "no such folder"}})) as address,
        rollout_client(address, staleness=4) as client,
    ):
        client.refresh(3)
        with pytest.raises(ServerFailed, match="refused /v1/weights with status 404: no such folder"):
            client.take(ask(3))


@pytest.mark.parametrize("how", ["folder", "memory"])
def test_as_many_versions_are_kept_as_a_server_may_be_told_to_load(tmp_path: Path, how: str) -> None:
    model = Decoder(SHAPE, 48)
    model.start(0)
    group = Group(ParallelConfig(device="cpu", strategy="ddp"))
    for staleness in (0, 1, 3):
        to = To((), how, staleness, Patient("", 1.0), ServerWait(), lambda line: None)
        publisher = Publisher(model, None, str(tmp_path / f"{how}-{staleness}"), group, to)
        try:
            folders = [Path(publisher(version).folder) for version in range(7)]
            kept = [number for number, folder in enumerate(folders) if folder.exists()]
            assert kept == list(range(6 - staleness, 7))
        finally:
            publisher.close()


# ---- who is to blame ----


def test_a_refusal_of_a_living_server_is_not_the_echo_of_its_death() -> None:
    def verdict(line: str) -> Verdict:
        return Verdict("failed", "grpo.server", line, 70)

    refused = "the server at 127.0.0.1:8000 refused /v1/weights with status 404: /version-9: no such folder"
    gone = "the server at 127.0.0.1:8000 did not answer /v1/weights for 10 min: can't be reached: Connection refused"
    assert not is_echo(verdict(refused)) and is_echo(verdict(gone))


# ---- waiting ----


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


class Silent:
    """A loopback address that takes no connections and refuses none: its queue is full."""

    def __init__(self) -> None:
        self._held = ExitStack()
        listening = self._held.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        self.address = f"127.0.0.1:{listening.getsockname()[1]}"
        for _ in range(3):
            own = self._held.enter_context(socket.socket())
            own.setblocking(False)
            own.connect_ex(listening.getsockname())

    def close(self) -> None:
        self._held.close()


@pytest.mark.parametrize("kind", ["refuses", "silent"])
def test_a_server_that_cannot_be_reached_is_reported_with_the_systems_reason(kind: str) -> None:
    lines, phases, is_stopping = list[str](), list[str](), threading.Event()
    wait = ServerWait(is_stopping.is_set, phases.append, lines.append)
    silent = Silent()
    address = f"127.0.0.1:{closed_port()}" if kind == "refuses" else silent.address
    patient = Patient("", 600.0, wait)
    began = time.monotonic()

    def stop() -> float:
        assert wait_for(lambda: lines or None, 30)
        reported = time.monotonic() - began
        is_stopping.set()
        return reported

    try:
        with ThreadPoolExecutor(1) as pool:
            reported = pool.submit(stop)
            with pytest.raises(StopRequested):
                wait.call(lambda: patient(address, "/v1/weights", None))
        assert reported.result() < 5 * PATIENCE, "seconds until the line"
    finally:
        patient.close()
        silent.close()
    reason = "Connection refused" if kind == "refuses" else "Connection timed out"
    assert lines[0] == f"the server at {address} can't be reached: {reason}; waiting for it, up to 10 min"
    assert phases == [FOR_SERVER, "train"], "the launcher hears what the rank waits for"


def test_a_server_that_is_back_is_reported() -> None:
    lines = list[str]()
    wait = ServerWait(report=lines.append)
    patient, port = Patient("", 60.0, wait), closed_port()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(patient, f"127.0.0.1:{port}", "/", None)
        assert wait_for(lambda: lines or None, 30)
        with socket.create_server(("127.0.0.1", port)) as listening:
            client, _ = listening.accept()
            with client:
                client.recv(1000)
                client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
                assert answer.result() == b"ok"
    assert len(lines) == 2 and f"the server at 127.0.0.1:{port} answers again, after " in lines[1]


class Gateway:
    """Passes connections on to a server, until it takes none any more and lets those that are open hang."""

    def __init__(self, port: int) -> None:
        self._port, self._listening = port, socket.create_server(("127.0.0.1", 0), backlog=0)
        self.port = int(self._listening.getsockname()[1])
        self._held: list[socket.socket] = []
        self._is_open = True
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while self._is_open:
            client = self._listening.accept()[0]
            try:
                upstream = socket.create_connection(("127.0.0.1", self._port))
            except OSError:
                client.close()
                continue
            self._held += [client, upstream]
            for one, other in ((client, upstream), (upstream, client)):
                threading.Thread(target=self._pass_on, args=(one, other), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while (data := source.recv(1 << 16)) and self._is_open:
                target.sendall(data)
            if self._is_open:
                target.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def cut(self) -> None:
        """Nobody reaches the server from here on."""
        self._is_open = False
        for _ in range(4):
            own = socket.socket()
            own.setblocking(False)
            own.connect_ex(("127.0.0.1", self.port))
            self._held.append(own)

    def close(self) -> None:
        for one in (self._listening, *self._held):
            one.close()


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("given")
    model_that_answers_with_a_digit(folder)
    return folder


@pytest.fixture(scope="module")
def forks(given: Path) -> Iterator[Forks]:
    with server(FORKS) as ranks:
        yield Forks(ranks, given)


LOST = ("dead", "hung", "unreachable")


@pytest.mark.parametrize(
    "lost", at_length_but(["hung-0", "unreachable-2"], [f"{how}-{number}" for how in LOST for number in (0, 2, 4)])
)
def test_trainers_that_wait_for_a_lost_server_stop_and_save(
    forks: Forks, given: Path, tmp_path: Path, lost: str
) -> None:
    how, staleness = lost.split("-")
    mine = Serving(given / "hf", tmp_path)
    gateway = Gateway(mine.port)
    try:
        words = forks.words("--max-steps", "100000", "--grpo.breaker_steps", "0", "--learning_rate", "1e-5")
        port = mine.port if how == "dead" else gateway.port
        words += ["--grpo.server", f"http://127.0.0.1:{port}", "--grpo.staleness", staleness]
        pids = forks._ranks.begin(2, tmp_path / "job", words=words)
        metrics = tmp_path / "job" / "run" / "metrics.jsonl"

        def steps() -> int:
            return metrics.read_text().count("\n") if metrics.exists() else 0

        assert wait_for(lambda: steps() > 2 or None, 60)
        if how == "dead":
            mine.kill()
        elif how == "hung":
            os.kill(mine._pid, signal.SIGSTOP)
        else:
            gateway.cut()
        reason = {"dead": "Connection refused", "unreachable": "Connection timed out"}.get(how, "")
        if reason:
            line, log = f"the server at 127.0.0.1:{port} can't be reached: {reason}", tmp_path / "job" / "rank-0.log"
            assert wait_for(lambda: line in log.read_text() or None, 30)
        seen: list[tuple[float, int]] = []
        assert wait_for(lambda: _is_still(seen, steps()) or None, 60), "trainers wait for the server"
        last, told = steps(), time.monotonic()
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        job = Job(tmp_path / "job", forks._ranks.codes())
        took = time.monotonic() - told
    finally:
        if how == "hung":
            os.kill(mine._pid, signal.SIGCONT)
        gateway.close()
        mine.close()
    assert job.codes == [0, 0], job.said()
    assert f"stopped: {last} of 100000 steps" in job.said() and steps() == last
    assert [path.name for path in (job.run / "checkpoints").glob("step-*")] == [f"step-{last:08d}"]
    assert took < 10 * PATIENCE, "seconds with what is saved; --grpo.server_timeout is 10 min"


WAITING_ROLLOUT = """
import asyncio, os

async def rollout(client, row, seed):
    chat = client.conversation(row["prompt"])
    await chat.sample(max_tokens=4)
    if os.path.exists(os.path.join(os.path.dirname(__file__), "wait")):
        await asyncio.sleep(3600)
    return chat.rollout(float(seed % 2))
"""


def test_trainers_that_wait_for_a_rollout_stop_and_save(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(WAITING_ROLLOUT)
    words = forks.words("--max-steps", "100000", "--grpo.breaker_steps", "0", "--learning_rate", "1e-5")
    pids = forks._ranks.begin(2, tmp_path / "job", words=[*words, "--grpo.rollout", f"{tmp_path}/game.py:rollout"])
    metrics = tmp_path / "job" / "run" / "metrics.jsonl"

    def steps() -> int:
        return metrics.read_text().count("\n") if metrics.exists() else 0

    assert wait_for(lambda: steps() > 2 or None, 60)
    (tmp_path / "wait").touch()
    seen: list[tuple[float, int]] = []
    assert wait_for(lambda: _is_still(seen, steps()) or None, 60)
    last, told = steps(), time.monotonic()
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    job = Job(tmp_path / "job", forks._ranks.codes())
    assert job.codes == [0, 0], job.said()
    assert f"stopped: {last} of 100000 steps" in job.said() and steps() == last
    assert [path.name for path in (job.run / "checkpoints").glob("step-*")] == [f"step-{last:08d}"]
    assert time.monotonic() - told < 10 * PATIENCE, "--grpo.rollout_timeout is 5 min"


def _is_still(seen: list[tuple[float, int]], steps: int) -> bool:
    """Whether there has been no new step for two seconds."""
    if not seen or seen[-1][1] != steps:
        seen.append((time.monotonic(), steps))
    return time.monotonic() - seen[-1][0] > 2


@pytest.mark.parametrize("staleness", at_length_but([3], [2, 3]))
def test_a_server_that_is_replaced_never_answers_with_the_weights_it_was_started_with(
    forks: Forks, given: Path, tmp_path: Path, staleness: int
) -> None:
    """Its weights are those before the first step: at steps behind the bound they would be too old."""
    mine = Serving(given / "hf", tmp_path)
    try:
        more = ("--max-steps", "16", "--export", "false", "--grpo.staleness", str(staleness))
        words = forks.words(*more, "--grpo.server", mine.url, "--learning_rate", "1e-5", "--grpo.breaker_steps", "0")
        forks._ranks.begin(2, tmp_path / "job", words=words)
        metrics = tmp_path / "job" / "run" / "metrics.jsonl"
        for lines in (6, 11):
            assert wait_for(
                lambda lines=lines: (metrics.exists() and metrics.read_text().count("\n") >= lines) or None, 60
            )
            mine.kill()
            mine.start()
        job = Job(tmp_path / "job", forks._ranks.codes())
    finally:
        mine.close()
    assert job.codes == [0, 0], job.said()
    assert len(job.metrics) == 16 and max(line["staleness_max"] for line in job.metrics) <= staleness, job.metrics
    assert all(line["resampled_stale"] == 0 for line in job.metrics), "the server refused, and generated nothing"
