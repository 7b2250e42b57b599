"""What draws and sends (top, web, metrics, plot, --notify) before hostile runs, hosts, servers and other users of the machine."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from browser import browsing
from conftest import Stoker, at_length, at_length_but, wait_for
from localuser import ATTACKER, start_as
from stoker.contract.shapes import Verdict
from stoker.control.doctor import debris
from stoker.control.launch.notify import Notifier
from stoker.control.show import serving
from stoker.control.show.web import texts

CPU_S = 60  # of a command that takes one or two; a busy machine's take longer
HUGE = 10**400  # JSON, and beyond every float
TOKEN = "hf_" + "aBcDeFgHiJkLmNoPqRsTuVwXyZ012345678"
Rows = list[dict[str, Any]]


def members(ranks: Any = (), gpus: Any = (), hosts: Any = ()) -> dict[str, Any]:
    return {
        "schema": 1,
        "time": 1e9,
        "members": {"ranks": list(ranks), "gpus": list(gpus), "hosts": list(hosts)},
    }


def moment(when: float = 1e9, **columns: Any) -> dict[str, Any]:
    return {"schema": 1, "time": when, "attempt": 0, "ranks": {}, "gpus": {}, "hosts": {}, **columns}


def make_run(root: Path, name: str, metrics: Rows = (), history: Rows = (), owner: int | None = None) -> Path:  # type: ignore[assignment]
    """A run of another machine, so that nobody here knows whether it is over."""
    folder = root / name
    (folder / "history").mkdir(parents=True)
    ranks = [{"rank": n, "role": "train", "label": f"GPU{n}", "host": "h"} for n in range(2)]
    about = {"schema": 1, "name": name, "started": 1e9, "launcher": {"pid": 1, "start": 1, "host": "elsewhere"}}
    (folder / "run.json").write_text(json.dumps({**about, "plan": {"world_size": 2, "ranks": ranks}}))
    events: Rows = [{"event": "run"}, {"event": "attempt", "attempt": 0}]
    events += [{"event": "rank-up", "rank": n, "pid": 5 + n} for n in range(2)]
    rows = {"events.jsonl": [{**event, "time": 1e9} for event in events], "metrics.jsonl": metrics}
    for file, lines in {**rows, "history/seconds.jsonl": history}.items():
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        (folder / file).write_text(text)
    if owner is not None:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, owner, owner)
    return folder


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))


def losses(*values: float) -> Rows:
    return [{"step": step, "time": 1e9 + step, "loss": value} for step, value in enumerate(values)]


# ---- numbers and sizes in a run's files ----

HISTORIES: dict[str, Rows] = {
    "hosts": [members(hosts=[f"h{n}" for n in range(300_000)]), moment()],
    "cards": [members(gpus=[("h", f"u{n}") for n in range(100_000)], hosts=["h"]), moment()],
    "hosts and cards": [members(gpus=[(f"h{n}", "u") for n in range(2000)], hosts=[f"h{n}" for n in range(2000)]), moment()],
    "heard": [members([0, 1], hosts=["h"]), moment(hosts={"heard": [HUGE]})],
    "memory": [members([0, 1], hosts=["h"]), moment(ranks={"memory": [HUGE, 1], "step": [HUGE, HUGE], "loss": [HUGE, 1]})],
}  # fmt: skip


@at_length
def test_hostile_histories_stop_no_viewer(stoker: Stoker) -> None:
    """Of other users in a shared folder, and of folders that were copied here."""
    for number, (what, history) in enumerate(HISTORIES.items()):
        make_run(stoker.cwd / "runs", f"mine {what}", history=history)
        if os.getuid() == 0:
            make_run(stoker.cwd / "runs", f"theirs {what}", history=history, owner=ATTACKER + number)
    for words in (("top", "--once"), ("top", "--json"), ("metrics", "--once")):
        done = stoker(*words, "--all", preexec_fn=limited)
        assert done.code == 0 and "Traceback" not in done.err, (words, done.code, done.err[-2000:])
        assert all(f"mine {what}" in done.out for what in HISTORIES)


@at_length
def test_a_hundred_runs_of_another_user_hold_up_no_viewer(stoker: Stoker) -> None:
    """All are said to be running, and share one large file."""
    runs = stoker.cwd / "runs"
    lines = [{"step": n, "time": 1e9, "loss": 1.0, **{f"m{m}": 0.123456789 for m in range(20)}} for n in range(30_000)]
    first = make_run(runs, "run-0", metrics=lines, owner=ATTACKER if os.getuid() == 0 else None)
    if os.getuid() != 0:
        pytest.skip("files of another user need root")
    for number in range(1, 60):
        folder = make_run(runs, f"run-{number}", owner=ATTACKER)
        (folder / "metrics.jsonl").unlink()
        os.link(first / "metrics.jsonl", folder / "metrics.jsonl")
    done = stoker("top", "--once", "--all", preexec_fn=limited)
    assert done.code == 0 and "run-59" in done.out, (done.code, done.err)


@at_length
def test_ranks_without_number_cost_little(stoker: Stoker) -> None:
    """The page asks for a run's ranks over time; lines without columns name as many as they like."""
    script = (
        "import sys; from stoker.control.show.web import details; from stoker.control.show.web.folders import Folders\n"
        "answer = details.over_time(Folders('runs', True), sys.argv[1], 0.0); print(len(answer['ranks']), len(answer['times']))"
    )
    columns = {"step": [1] * 50_000}
    many = [
        line
        for n in range(8)
        for line in (members(range(n * 50_000, (n + 1) * 50_000)), moment(1e9 + n, ranks=columns))
    ]
    empty = [members(range(60_000)), *(moment(1e9 + n) for n in range(5000))]
    for name, history in (("many", many), ("empty", empty)):
        make_run(stoker.cwd / "runs", name, history=history)
        done = python(stoker, script, name)
        assert done[0] == 0, done
        assert int(done[1].split()[0]) <= 4096


def python(stoker: Stoker, script: str, *words: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", script, *words],
        cwd=stoker.cwd,
        env=stoker.environment(),
        capture_output=True,
        text=True,
        preexec_fn=limited,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr[-2000:]


@pytest.mark.parametrize("blocks", at_length_but([50], [50, 250]))
@at_length
def test_half_a_million_names_of_metrics_cost_little(stoker: Stoker, blocks: int) -> None:
    """Or 100,000 in 50 blocks."""
    full, each = 4 * blocks, range(400)
    lines = [{"step": n, "time": 1e9, "loss": 1.0, **{f"{n * 400 + m:x}": 1 for m in each}} for n in range(full)]
    lines += [{"step": full + n} for n in range(1000 * blocks)]
    for block in range(blocks):  # few in a line, and others in every thousand lines
        lines[full + 1000 * block] |= {f"{block}-{m}": "x" for m in each}
    make_run(stoker.cwd / "runs", "names", metrics=lines)
    done = stoker("plot", "names", preexec_fn=limited)
    assert done.code == 0 and f"step {full - 1}" in done.out, done.err


LARGEST = [(1.7e308, -1.7e308) * 40, (1.7e308,) * 80]


@pytest.mark.parametrize("values", at_length_but(LARGEST[:1], LARGEST))
def test_the_largest_numbers_are_drawn(stoker: Stoker, values: tuple[float, ...]) -> None:
    make_run(stoker.cwd / "runs", "large", metrics=losses(*values))
    for words in ((), ("--log",), ("--smooth", "3"), ("--png", "large.png")):
        done = stoker("plot", "large", *words)
        assert done.code == 0 and "Traceback" not in done.err, (words, done.err)
    for words in (("top", "--once"), ("metrics", "--once"), ("runs",), ("compare", "large", "large")):
        assert "Traceback" not in stoker(*words).err, words


# ---- the page and its port ----


class Page:
    def __init__(self, port: int, token: str) -> None:
        self.port, self.token = port, token
        answer = self.ask(f"/?token={token}")
        self.base = answer.headers["Location"]
        self.cookie = answer.headers["Set-Cookie"].partition(";")[0]

    def ask(self, path: str, **headers: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", path, headers=headers)
        return connection.getresponse()


@contextlib.contextmanager
def page_of(stoker: Stoker, *words: str) -> Iterator[Page]:
    child = stoker.start("web", "--port", "0", "--interval", "0.25", *words)
    assert child.stdout is not None
    try:
        found = re.search(r":(\d+)/\?token=([\w-]+)", child.stdout.readline().decode())
        assert found
        yield Page(int(found[1]), found[2])
    finally:
        child.send_signal(signal.SIGTERM)
        assert child.wait(100) == 0
        child.stdout.close()


NAMES = [f"{n}" * 65_000 for n in range(10, 24)]
LONG = [members(gpus=[(name, "u") for name in NAMES], hosts=NAMES), moment()]  # more than may wait for a viewer


@pytest.mark.parametrize("history", [HISTORIES["memory"], LONG], ids=("numbers", "names"))
def test_a_hostile_run_does_not_stop_the_page(stoker: Stoker, history: Rows) -> None:
    make_run(stoker.cwd / "runs", "mine", history=history)
    with page_of(stoker) as page:
        stream = page.ask(f"{page.base}events?run=mine", Cookie=page.cookie)
        for _ in range(2):
            line = next(line for line in iter(stream.readline, b"") if line.startswith(b"data: "))
            assert not json.loads(line[6:])["problems"]
        stream.close()


def test_the_cookie_goes_to_no_other_port(stoker: Stoker, tmp_path: Path) -> None:
    """A browser sends cookies of 127.0.0.1:9910 to 127.0.0.1:6006 as well, where another user may listen."""
    seen: list[str] = []

    class Listener(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers.get("Cookie") or "")
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            return

    other = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Listener)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    try:
        with page_of(stoker) as page, browsing(tmp_path) as chromium:
            chromium.open(f"http://127.0.0.1:{page.port}/?token={page.token}")
            assert "stoker" in chromium.js("return document.title")
            for path in ("", "api/hello", "events"):
                chromium.open(f"http://127.0.0.1:{other.server_port}/{path}")
    finally:
        other.shutdown()
        other.server_close()
    assert seen and not any(seen), seen


def test_a_cookie_alone_opens_nothing(stoker: Stoker) -> None:
    with page_of(stoker) as page, page_of(stoker) as second:
        for path in ("/", "/main.js", "/api/hello", "/events", "/file?run=x&path=y", f"{second.base}api/hello"):
            assert page.ask(path, Cookie=page.cookie).status == 403, path
        assert page.ask(f"{page.base}api/hello").status == 403
        # Whoever listens on another port of this host can set a cookie of that name.
        name = page.cookie.partition("=")[0]
        assert page.ask(f"{page.base}api/hello", Cookie=f"{name}=x; {page.cookie}; {name}=y").status == 200


def silent_connections(port: int, over: int) -> Callable[[], None]:
    """Three hundred that say nothing, opened again as they are closed, until the pipe's other end is closed."""

    def attack() -> None:
        opened: list[socket.socket] = []
        while not select.select([over], [], [], 0)[0]:
            while len(opened) < 300:
                client = socket.socket()
                client.setblocking(False)
                client.connect_ex(("127.0.0.1", port))
                opened.append(client)
            time.sleep(0.02)
            for client in tuple(opened):
                with contextlib.suppress(BlockingIOError):
                    with contextlib.suppress(ConnectionError):
                        client.recv(1)
                    client.close()
                    opened.remove(client)

    return attack


def test_another_users_silent_connections_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty-four places, each taken by one that would wait for an hour."""
    monkeypatch.setattr(serving, "REQUEST_S", 3600.0)
    listening = serving.listen("127.0.0.1", 0)
    port = listening.getsockname()[1]
    over = threading.Event()
    server = serving.Server(listening, lambda _: serving.Answer(200, b"here"))
    thread = threading.Thread(target=server.serve, args=(over.is_set,))
    reading, writing = os.pipe()
    os.set_inheritable(writing, False)

    def attack() -> None:
        os.close(writing)
        silent_connections(port, reading)()

    attacker = start_as(ATTACKER, attack)
    thread.start()
    try:

        def answer() -> bytes | None:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            try:
                connection.request("GET", "/")
                return connection.getresponse().read()
            except ConnectionError:
                return None  # a flood of thousands a second may push out one that is slow to ask
            finally:
                connection.close()

        assert wait_for(lambda: connections_to(port) >= serving.MOST_CLIENTS or None, 60)
        for _ in range(5):
            assert wait_for(answer, 60) == b"here"
    finally:
        os.close(writing)
        assert os.waitpid(attacker, 0)[1] == 0
        os.close(reading)
        over.set()
        thread.join()


def connections_to(port: int) -> int:
    """That the server's side has taken, or keeps in its queue."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return sum(line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "01" for line in lines)


# ---- secrets ----


def test_a_token_in_a_phase_or_a_metrics_name_is_neither_kept_nor_served(stoker: Stoker) -> None:
    script = stoker.script(
        "train.py",
        "import json, os, time, stoker\n"
        f"stoker.beat(step=1, loss=1.0)\nstoker.phase('loading {TOKEN}')\ntime.sleep(2.5)\n"
        "path = os.path.join(os.environ['STOKER_RUN_DIR'], 'metrics.jsonl')\n"
        f"line = {{'step': 1, 'time': time.time(), 'loss': 1.0, 'acc/{TOKEN}': 0.5, 'api_key=s3cr3tvalue99x': 1.0}}\n"
        "open(path, 'w').write(json.dumps(line) + '\\n')\n",
    )
    assert stoker("run", "--nproc-per-node", "1", script).code == 0
    kept = {path.name: path.read_text() for path in (stoker.latest / "history").iterdir()}
    assert "loading <redacted>" in kept["seconds.jsonl"]
    assert not [name for name, text in kept.items() if TOKEN in text]
    served = stoker("metrics", "--once").out
    assert 'metric="acc/<redacted>"' in served and TOKEN not in served and "s3cr3t" not in served


# ---- --notify ----

ANSWERS = {
    "no HTTP": b"\x1b]0;owned\x07nonsense\r\n\r\n",
    "a header without end": b"HTTP/1.1 200 OK\r\nA: " + b"x" * 70_000 + b"\r\n\r\n",
    "too many headers": b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200 + b"\r\n",
    "a redirect to a file": b"HTTP/1.1 302 x\r\nLocation: file:///etc/passwd\r\n\r\n",
    "codes in its reason": b"HTTP/1.1 500 \x1b[31mx\r\n\r\n",
}


@contextlib.contextmanager
def answering(data: bytes) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            client, _ = server.accept()
            with client:
                client.recv(65536)
                client.sendall(data)

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/topic-nobody-knows"
        thread.join()


def sent_to(target: str, **changes: Any) -> list[str]:
    lines: list[str] = []
    notifier = Notifier(target, lines.append)
    about: dict[str, Any] = {"status": "failed", "cause": "rank.exit", "summary": "it failed", "exit_code": 1}
    notifier.tell(Verdict(**{**about, **changes}), "ended", "")
    notifier.close()
    return lines


@pytest.mark.parametrize("what", ANSWERS)
def test_a_hostile_service_gets_one_clean_line(what: str) -> None:
    with answering(ANSWERS[what]) as url:
        lines = sent_to(url)
    assert len(lines) == 1 and lines[0].isprintable(), lines
    assert "Traceback" not in lines[0] and "client.py" not in lines[0] and "topic-nobody-knows" not in lines[0], lines
    assert "127.0.0.1" in lines[0]


def test_targets_that_cant_be_and_line_ends_in_a_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for target in ("http://127.0.0.1:abc/t", "http://[::1/t"):
        lines = sent_to(target)
        assert len(lines) == 1 and "Error" not in lines[0].replace("InvalidURL", ""), lines
    mail = tmp_path / "mail.txt"
    (tmp_path / "sendmail").write_text(f"#!/bin/sh\ncat > {mail}\n")
    (tmp_path / "sendmail").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("STOKER_SMTP", raising=False)
    assert not sent_to("mailto:me@example.org", cause="x\nBcc: all@example.org", summary="a\r\nBcc: b@example.org")
    assert not re.search(r"(?m)^Bcc", mail.read_text()) and "Subject: stoker: a run failed" in mail.read_text()


def test_a_run_of_countless_files_is_listed_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """800,000 links in folders of 1,000 each held the page up for half a minute, and everybody's requests with it."""
    looked = 0
    scan = os.scandir

    def counted(path: Any) -> Any:
        nonlocal looked
        looked += 1
        return scan(path)

    for number in range(300):
        (tmp_path / "checkpoints" / f"{number}" / "a").mkdir(parents=True)
        (tmp_path / "checkpoints" / f"{number}" / "a" / "x").touch()
    monkeypatch.setattr(texts, "_MOST_ENTRIES", 100)
    monkeypatch.setattr(os, "scandir", counted)
    folders = SimpleNamespace(place=lambda _run: str(tmp_path), record=lambda _run: SimpleNamespace(mine=False))
    found = texts.listing(folders, "run")  # type: ignore[arg-type]
    assert looked < 300 and len(found["checkpoints"]) == 100


def test_processes_with_countless_mappings_cost_little(monkeypatch: pytest.MonkeyPatch) -> None:
    assert any("libc.so" in path for path in debris._mapped(os.getpid(), ("/lib",)))
    monkeypatch.setattr(debris, "_MAPPINGS", 10)
    assert not debris._mapped(os.getpid(), ("/lib",))
