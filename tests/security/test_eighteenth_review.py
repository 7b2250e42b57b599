"""What the eighteenth review found: a port on another address, a mail server that never stops talking, bent plans in checkpoints."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator

import pytest

from conftest import wait_for
from localuser import ATTACKER, needs_root, start_as
from measuring import measured
from stoker.contract import listeners
from stoker.contract.shapes import Verdict
from stoker.control.launch.ourselves import own_program
from stoker.control.roles.ready import MISSES, Watching
from stoker.control.roles.role import Ready


def listening(address: str, port: int = 0, dual: bool = False) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    if ":" in address:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not dual)
    made.bind((address, port))
    made.listen()
    return made


class Neighbour:
    """Another user, who listens until this is closed."""

    def __init__(self, address: str, port: int = 0, dual: bool = False) -> None:
        needs_root()
        told, over = os.pipe(), os.pipe()

        def listen() -> None:
            with listening(address, port, dual) as made:
                os.write(told[1], str(made.getsockname()[1]).encode())
                os.close(over[1])
                os.read(over[0], 1)

        self._pid, self._over = start_as(ATTACKER, listen), over[1]
        os.close(told[1])
        os.close(over[0])
        self.port = int(os.read(told[0], 10))
        os.close(told[0])

    def __enter__(self) -> Neighbour:
        return self

    def __exit__(self, *problem: object) -> None:
        os.close(self._over)
        assert os.waitpid(self._pid, 0)[1] == 0


@pytest.mark.parametrize("address", ["127.0.0.2", "::"])
def test_a_neighbours_port_on_another_address_stops_no_role(address: str) -> None:
    """It ended the job: a role that was ready counted as gone."""
    with listening("127.0.0.1") as own:
        port = own.getsockname()[1]
        rule = Ready("port", "", check=0.05)
        watching = Watching(rule, [("127.0.0.1", port)], 0.0, 1)
        assert watching.ready.wait(10)
        with Neighbour(address, port):
            assert listeners.listening_users("127.0.0.1", port) == {os.getuid()}
            for _ in range(MISSES + 2):
                own.accept()[0].close()  # one look each
        watching.close()
        assert not watching.unhealthy, watching.unhealthy


@pytest.mark.parametrize(("address", "dual"), [("127.0.0.1", False), ("0.0.0.0", False), ("::", True)])
def test_a_neighbour_who_would_be_asked_in_the_roles_place_is_found(address: str, dual: bool) -> None:
    with Neighbour(address, dual=dual) as neighbour:
        assert listeners.listening_users("127.0.0.1", neighbour.port) == {ATTACKER}
        assert listeners.listening_users("localhost", neighbour.port) == {ATTACKER}
        watching = Watching(Ready("port", ""), [("127.0.0.1", neighbour.port)], 0.0, 1)
        wrong = wait_for(lambda: watching.newest or None, 10)
        watching.close()
        assert wrong is not None and "is in use by" in wrong and not watching.ready.is_set()


class Talker:
    """A server that sends one thing for ever, as fast as it is read."""

    def __init__(self, data: bytes, pause: float = 0.0) -> None:
        self._server, self._over = listening("127.0.0.1"), threading.Event()
        self._data, self._pause = data, pause
        self.port = self._server.getsockname()[1]
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        self._server.settimeout(0.05)
        while not self._over.is_set():
            try:
                with self._server.accept()[0] as peer:
                    peer.settimeout(0.5)
                    while not self._over.wait(self._pause):
                        peer.sendall(self._data)
            except OSError:
                continue

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._server.close()


@pytest.fixture
def talker(request: pytest.FixtureRequest) -> Iterator[Talker]:
    made = Talker(*request.param)
    yield made
    made.close()


def _sent(kind: str, to: str, seconds: float) -> tuple[int, str, int]:
    """(exit code, what it said, its memory in MB) of the program that takes one message to a service."""
    verdict = Verdict("failed", "rank.exit", "it ended", 3, None).to_json()
    told = {
        "target": {"kind": kind, "to": to},
        "verdict": verdict,
        "what": "restarting",
        "run_dir": "",
        "seconds": seconds,
    }
    with tempfile.TemporaryFile() as message:
        message.write(json.dumps(told).encode())
        message.seek(0)
        argv = own_program("stoker.control.show.notice", "entry")
        done = subprocess.run(measured(argv), stdin=message, capture_output=True, text=True, check=True)
    code, _, kilobytes = json.loads(done.stdout)
    return code, done.stderr, kilobytes >> 10


@pytest.mark.parametrize("talker", [(b"220-" + b"A" * 8000 + b"\r\n",)], indirect=True)
def test_a_mail_server_that_answers_without_end_takes_little_memory(
    talker: Talker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """170 MB a second were kept."""
    monkeypatch.setenv("STOKER_SMTP", f"smtp://127.0.0.1:{talker.port}")
    code, said, megabytes = _sent("mail", "me@example.org", 120.0)
    assert (code, said) == (1, "mail: 127.0.0.1 answers without end\n")
    assert megabytes < 1024


@pytest.mark.parametrize("talker", [(b"HTTP/1.1 100 Continue\r\n\r\n", 0.02)], indirect=True)
def test_a_message_about_a_restart_ends_while_the_run_goes_on(talker: Talker) -> None:
    """Nobody waits for it before the run's end: it talked with such a server until then."""
    code, said, _ = _sent("ntfy", f"http://127.0.0.1:{talker.port}/topic", 2.0)
    assert (code, said) == (1, "ntfy did not answer within 2 s\n")
