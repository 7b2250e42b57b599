"""The ports of `stoker web` and `stoker metrics`: who is answered, and from where."""

from __future__ import annotations

import http.server
import json
import os
import re
import shlex
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import browsing
from conftest import Stoker, machine_json
from stoker.control.show import http_server
from test_metrics import get, raw, served
from test_web import Page, finished, run_id, web

TOKEN = "hf_" + "aBcDeFgHiJkLmNoPqRsTuVwXyZ012345678"
PATHS = ("/", "/main.js", "/events", "/api/files", "/api/sparks", "/file?run=x&path=y", "/nothing")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("web")
    (folder / "machine.json").write_text(json.dumps(machine_json(0)))
    env = {key: value for key, value in os.environ.items() if not key.startswith("STOKER_")}
    stoker = Stoker(folder, env | {"STOKER_MACHINE": str(folder / "machine.json")})
    finished(stoker, "exp1")
    with web(stoker) as made:
        made.run = run_id(folder, "exp1")
        yield made


def stop(page: Page, body: bytes, content_type: str = "application/json", **headers: str) -> int:
    return page.get("/api/stop", method="POST", body=body, Content_Type=content_type, **headers)[0]


# ---- the page ----


def test_the_token_becomes_a_cookie_and_leaves_the_address(page: Page) -> None:
    status, headers, _ = page.get(f"/?token={page.token}", cookie="")
    assert status == 303 and re.fullmatch(r"/[\w-]{40,}/", page.base) and headers["Location"] == page.base
    assert page.token not in headers["Set-Cookie"] + page.base
    assert {"HttpOnly", "SameSite=Strict", f"Path={page.base}"} <= set(headers["Set-Cookie"].split("; "))
    status, headers, body = page.get("/")
    assert status == 200 and b"main.js" in body
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy and "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy and headers["Referrer-Policy"] == "no-referrer"
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-store"


def test_without_the_token_nothing_is_answered(page: Page) -> None:
    name, _, session = page.cookie.partition("=")
    for path in PATHS:
        for cookie in ("", f"{name}=", f"{name}=wrong", f"{name}={page.token}", f"other={session}"):
            assert page.get(path, cookie=cookie)[0] == 403, (path, cookie)
    for path in ("/?token=", f"/?token={page.token[:-1]}", f"/main.js?token={page.token}"):
        assert page.get(path, cookie="")[0] == 403, path
    # Another server of this host may have set a cookie of the same name.
    assert page.get("/main.js", cookie=f"{name}=x; {page.cookie}; {name}=y")[0] == 200


def test_a_foreign_host_or_origin_is_refused(page: Page) -> None:
    for path in PATHS:
        assert page.get(path, Host="evil.example:80")[0] == 403
        assert page.get(path, Origin="http://evil.example")[0] == 403
        assert page.get(path, Origin="null")[0] == 403
    assert page.get("/?token=" + page.token, cookie="", Host="evil.example")[0] == 403
    own = f"127.0.0.1:{page.port}"
    assert page.get("/main.js", Host=own, Origin=f"http://{own}")[0] == 200
    assert page.get("/main.js", Host="localhost:1234", Origin="http://localhost:1234")[0] == 200, "through ssh -L"


def test_stop_needs_its_origin_its_content_type_and_a_run(page: Page) -> None:
    own, body = f"http://127.0.0.1:{page.port}", json.dumps({"run": page.run}).encode()
    assert page.get("/api/stop")[0] == 405
    assert stop(page, body) == stop(page, body, Origin="http://evil.example") == 403
    for content_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        assert stop(page, body, content_type, Origin=own) == 403, content_type
    assert page.get("/api/stop", cookie="", method="POST", body=body, Content_Type="application/json", Origin=own)[0] == 403  # fmt: skip
    assert stop(page, b"nonsense", Origin=own) == stop(page, b"[1]", Origin=own) == 400
    assert stop(page, b'{"run": "../x"}', Origin=own) == 404
    assert stop(page, body, "application/json; charset=utf-8", Origin=own) == 409, "it is over"


def test_a_long_body_and_long_headers_are_refused_with_a_reason(page: Page) -> None:
    own = f"http://127.0.0.1:{page.port}"
    assert stop(page, b"x" * 100_000, Origin=own) == 413
    assert page.get("/main.js", X_Padding="x" * 20_000)[0] == 431


def test_a_browser_opens_the_page_and_sends_its_cookie_to_no_other_port(stoker: Stoker, tmp_path: Path) -> None:
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
        with web(stoker) as page, browsing(tmp_path) as chromium:
            chromium.open(page.printed)
            assert "stoker" in chromium.js("return document.title")
            for path in ("", "api/files", "events"):
                chromium.open(f"http://127.0.0.1:{other.server_port}/{path}")
    finally:
        other.shutdown()
        other.server_close()
    assert seen and not any(seen), seen


def test_the_page_listens_on_loopback_and_elsewhere_only_when_told(stoker: Stoker) -> None:
    child = stoker.start("web", "--port", "0", "--host", "0.0.0.0")
    assert child.stdout is not None
    try:
        address = re.fullmatch(r"http://[\w.-]+:(\d+)/(\?token=\S+)\n", child.stdout.readline().decode())
        assert address and b"not encrypted" in child.stdout.readline()
        for name, status in (("127.0.0.1", 303), ("192.0.2.7", 303), (os.uname().nodename, 303), ("evil.example", 403)):
            assert get(int(address[1]), f"/{address[2]}", Host=f"{name}:{address[1]}")[0] == status, name
    finally:
        child.send_signal(signal.SIGINT)
        assert child.wait(100) == 0
        child.stdout.close()
    for command in ("web", "metrics"):
        child = stoker.start(command, "--port", "0")
        assert child.stdout is not None
        try:
            address = re.search(r"http://([\d.]+):(\d+)/", child.stdout.readline().decode())
            assert address is not None and address[1] == "127.0.0.1"
            assert addresses_of(int(address[2])) == {"0100007F"}
        finally:
            child.send_signal(signal.SIGTERM)
            assert child.wait(100) == 0
            child.stdout.close()


def addresses_of(port: int) -> set[str]:
    """Return the addresses at which somebody listens on this port, as the kernel writes them."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {line[1].partition(":")[0] for line in lines if line[1].endswith(f":{port:04X}") and line[3] == "0A"}


# ---- the metrics ----


def test_metrics_are_answered_by_get_under_our_names() -> None:
    with served() as port:
        assert get(port)[0] == get(port, Host="localhost:1234")[0] == 200
        assert get(port, Host="evil.example:9911")[0] == 403
        for method in (b"POST", b"PUT", b"OPTIONS"):
            assert raw(port, method + b" /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").startswith(b"HTTP/1.1 405 ")
        assert raw(port, b"GET / HTTP/1.1\r\nContent-Length: 5000\r\n\r\n").startswith(b"HTTP/1.1 413 ")


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
    exported = stoker("metrics", "--once").out
    assert 'metric="acc/<redacted>"' in exported and TOKEN not in exported and "s3cr3t" not in exported


def test_the_documented_prometheus_listens_on_loopback() -> None:
    root = Path(__file__).parents[2]
    texts = [path.read_text() for path in (*root.glob("docs/**/*.md"), *root.glob("deploy/**/*.yml"))]
    commands = [match for text in texts for match in re.findall(r"prometheus --config\.file=[^`\n]+", text)]
    assert len(commands) >= 2
    for command in commands:
        words = shlex.split(command)
        assert "--web.listen-address=127.0.0.1:9090" in words, "else it listens on all interfaces, without a password"
        assert "--storage.tsdb.path=$HOME/prometheus" in words, "anybody may make a folder below /tmp first"


# ---- slow clients ----


def test_a_slow_client_is_answered_and_a_silent_one_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit counts from the last byte that moved, in either direction."""
    monkeypatch.setattr(http_server, "IDLE_S", 0.6)
    large = b"x" * (16 << 20)
    listening = http_server.listen("127.0.0.1", 0)
    server, over = http_server.HttpServer(listening, lambda _: http_server.HttpResponse(200, large)), threading.Event()
    thread = threading.Thread(target=server.serve, args=(over.is_set, 0.05))
    thread.start()
    try:
        address = listening.getsockname()
        with socket.create_connection(address) as silent, socket.create_connection(address) as slow:
            for piece in (b"GET / ", b"HTTP/1.1\r\n", b"Host: localhost\r\n", b"X: y\r\n", b"\r\n"):
                slow.sendall(piece)
                time.sleep(0.25)
            received = 0
            while data := slow.recv(2 << 20):
                received += len(data)
                time.sleep(0.02)
            assert received > len(large)
            assert silent.recv(1) == b""
    finally:
        over.set()
        thread.join()
