"""Servers of rollouts that answer nonsense or too slowly, and another user on their port: one clear line, and neither key nor prompt."""

from __future__ import annotations

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from localuser import ATTACKER, start_as
from stoker.training.rl.asking import Asking, NoAnswer, ServerFailed
from stoker.training.rl.dialects import Published, Wanted
from stoker.training.rl.remote import OtherWeights, Servers
from stoker.training.rl.sampler import Ask
from stoker.training.rl.server_match import Unanswered, served_logprobs

KEY = "a-key-that-nobody-else-has"


ASK = Ask((0, 0), 0, ((1, 2),), (0,))


Talk = Callable[[socket.socket, threading.Event], None]


@contextmanager
def server(talk: Talk) -> Iterator[str]:
    """HOST:PORT of one that reads a request, and then does as `talk` says until the event is set."""
    over = threading.Event()

    def answer(client: socket.socket) -> None:
        with client:
            try:
                head = b""
                while b"\r\n\r\n" not in head:
                    head += client.recv(1 << 16)
                head, _, body = head.partition(b"\r\n\r\n")
                size = int(head.lower().split(b"content-length: ")[1].split()[0])
                while len(body) < size:
                    body += client.recv(1 << 16)
                talk(client, over)
            except OSError:
                return  # it has hung up

    def accept() -> None:
        while True:
            try:
                client = listening.accept()[0]
            except OSError:
                return
            threading.Thread(target=answer, args=(client,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        over.set()
        listening.shutdown(socket.SHUT_RDWR)


@contextmanager
def asking(address: str, patience_s: float) -> Iterator[Servers]:
    newest, wanted = Published(0, "/nowhere", "right"), Wanted(16, 1.0, frozenset({0}), 100, 64)
    servers = Servers([address], KEY, wanted, lambda _: newest, staleness=0, patience_s=patience_s)
    servers._known[0] = newest
    try:
        yield servers
    finally:
        servers.close()


def told(**keys: Any) -> Talk:
    choice = {"index": 0, "token_ids": [1], "versions": [0], "logprobs": {"token_logprobs": [-1.0]}}
    body = json.dumps({"choices": [{**choice, "weights": {"version": 0, "digest": "right"}, **keys}]}).encode()
    return lambda client, _: client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))


@pytest.mark.parametrize(
    "keys",
    [
        {"index": float("inf")},
        {"versions": [float("inf")]},
        {"versions": [-1]},
        {"weights": {"version": float("inf"), "digest": ""}},
        {"logprobs": {"token_logprobs": [10**400]}},
    ],
)
def test_a_servers_absurd_numbers_are_one_line(keys: dict[str, Any]) -> None:
    with server(told(**keys)) as address, asking(address, 10.0) as servers:
        with pytest.raises(ServerFailed, match="an answer that can't be read"):
            servers.take(ASK)


def test_a_servers_digest_is_shown_without_codes_and_in_short() -> None:
    digest = "\x1b[2J\nGRPO stopped: all is well" * 1000
    with server(told(weights={"version": 0, "digest": digest})) as address, asking(address, 10.0) as servers:
        with pytest.raises(OtherWeights) as found:
            servers.take(ASK)
    assert str(found.value).isprintable() and len(str(found.value)) < 600


def by_and_by(begin: bytes, more: bytes) -> Talk:
    def talk(client: socket.socket, over: threading.Event) -> None:
        client.sendall(begin)
        while not over.wait(0.02):
            client.sendall(more)

    return talk


SLOW = {
    "body": by_and_by(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", b" "),
    "unknown length": by_and_by(b"HTTP/1.1 200 OK\r\n\r\n", b" "),
    "header": by_and_by(b"HTTP/1.1 200 OK\r\nX: ", b"x"),
    "continue": by_and_by(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
}


@pytest.mark.parametrize("how", SLOW)
def test_a_server_that_answers_byte_by_byte_is_given_up(how: str) -> None:
    with server(SLOW[how]) as address, asking(address, 0.2) as servers:
        with pytest.raises(ServerFailed, match="no complete answer within"):
            servers.take(ASK)
        with pytest.raises(Unanswered, match="no complete answer within"):
            served_logprobs(address, "", (1, 2), seconds=0.2)


LISTENS = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
with socket.create_server(("127.0.0.1", 0)) as listening:
    print(listening.getsockname()[1], flush=True)
    while True:
        client = listening.accept()[0]
        client.settimeout(5)
        if len(sys.argv) > 1:  # nobody listens any more
            listening.close()
        try:
            print(client.recv(1 << 16), flush=True)
        except OSError:
            print(b"", flush=True)
        if len(sys.argv) > 1:
            break
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize("more", [(), ("once",)])
def test_another_user_on_the_servers_port_gets_neither_key_nor_prompt(more: tuple[str, ...]) -> None:
    command = [sys.executable, "-c", LISTENS, *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            address = f"127.0.0.1:{int(other.stdout.readline())}"
            with asking(address, 0.1) as servers, pytest.raises(ServerFailed) as found:
                servers.take(ASK)
            assert more or "is in use by nobody" in str(found.value)
        finally:
            other.kill()
        assert set(other.stdout.read().split()) <= {"b''"}, "who listens is looked at before anything is sent"


@pytest.mark.parametrize("backlog", [0, 8])
def test_who_listens_at_the_other_address_of_localhost_keeps_no_trainer_from_its_server(
    monkeypatch: pytest.MonkeyPatch, backlog: int
) -> None:
    class Ours(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"ours" if self.headers["Authorization"] == "Bearer k" else b"")

        def log_message(self, *words: object) -> None:
            pass

    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Ours)
    port = web.server_port
    resolve: Callable[..., list[Any]] = socket.getaddrinfo

    def both(host: str, *args: Any, **more: Any) -> list[Any]:
        """As where /etc/hosts has both, which is usual."""
        if host != "localhost":
            return resolve(host, *args, **more)
        return [found for one in ("::1", "127.0.0.1") for found in resolve(one, *args, **more)]

    def listen() -> None:
        with socket.socket(socket.AF_INET6) as own:
            try:
                own.bind(("::1", port))
            except OSError:
                os._exit(7)
            own.listen(backlog)
            held = [socket.create_connection(("::1", port)) for _ in range(backlog == 0)]  # the next one waits
            os.write(told, b"!")
            threading.Event().wait()
            del held

    monkeypatch.setattr(socket, "getaddrinfo", both)
    hears, told = os.pipe()
    attacker = start_as(ATTACKER, listen)
    os.close(told)
    thread = threading.Thread(target=web.serve_forever)
    thread.start()
    try:
        if not os.read(hears, 1):
            pytest.skip("there is no ::1 here")
        asked = Asking().post(f"localhost:{port}", "/", None, {"Authorization": "Bearer k"}, seconds=20.0)
        assert asked == (200, b"ours")
        with pytest.raises(NoAnswer, match="in use by"):
            Asking().post(f"[::1]:{port}", "/", None, {}, seconds=20.0)
    finally:
        web.shutdown()
        thread.join()
        web.server_close()
        os.kill(attacker, 9)
        os.waitpid(attacker, 0)
        os.close(hears)
