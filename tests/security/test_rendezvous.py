"""Machines started by hand meet at a port: other programs may speak to it, and with a secret only machines that know it join."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import Stoker, wait_for
from forked_ranks import free_port
from stoker.contract.errors import Refusal
from stoker.control.launch import rendezvous
from stoker.control.launch.rendezvous import Secret, find_secret
from stoker.control.plan.targets import NodeGroup, RendezvousConfig

SECRET, OTHER = "0123456789abcdef" * 4, "another secret, as long as it must be"
SOON = 5.0
PLENTY = 100.0  # less than a test's own limit


class Machine:
    """One that meets others, in a thread."""

    def __init__(self, port: int, count: int = 2, ranks: int = 1, name: str = "job", most: int = 0) -> None:
        self.lines: list[str] = []
        self.outcome: NodeGroup | BaseException | None = None
        self._stop = False
        meeting = RendezvousConfig(count, None, "127.0.0.1", port, name, most)

        def rest() -> None:
            time.sleep(0.005)
            if self._stop:
                raise InterruptedError("the test is over")

        def meet() -> None:
            try:
                self.outcome = rendezvous.join_machines(meeting, ranks, lambda: 29999, rest, self.lines.append)
            except BaseException as problem:
                self.outcome = problem

        self._thread = threading.Thread(target=meet, daemon=True)
        self._thread.start()

    def end(self) -> Any:
        self._thread.join(PLENTY)
        return self.outcome

    def stop(self) -> None:
        self._stop = True
        self._thread.join(PLENTY)


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def machines() -> Iterator[list[Machine]]:
    made: list[Machine] = []
    yield made
    for machine in made:
        machine.stop()


def connect(port: int) -> socket.socket:
    def once() -> socket.socket | None:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=PLENTY)
        except ConnectionRefusedError:
            return None

    connection = wait_for(once, SOON)
    assert connection is not None
    return connection


def hello(**more: Any) -> bytes:
    return json.dumps({"job": "job", "count": 2, "ranks": 1, **more}).encode() + b"\n"


def start_host(port: int, machines: list[Machine], **more: Any) -> Machine:
    """It listens by the time this returns."""
    machine = Machine(port, **more)
    machines.append(machine)
    assert wait_for(lambda: True if machine.lines or machine.outcome else None, SOON)
    return machine


def read_json_line(connection: socket.socket) -> Any:
    return json.loads(connection.makefile().readline())


OTHER_PROGRAMS = {
    "silent": b"",
    "half a line": b'{"job": "jo',
    "deep list": b"[" * 4000 + b"\n",
    "endless": b"x" * 100_000,
    "not UTF-8": b"\xff\xfe\n",
    "empty": b"\n",
    "a list": b"[]\n",
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "TLS": bytes.fromhex("16030100c8010000c40303") + b"\n",
    "ssh": b"SSH-2.0-OpenSSH_9.6\r\n",
    "text ranks": hello(ranks="1"),
    "-1 ranks": hello(ranks=-1),
    "no ranks": b'{"job": "job", "count": 2}\n',
    "another job": hello(job="other"),
    "a proof at once": b'{"proof": "x"}\n',
}


@pytest.mark.parametrize("secret", ["", SECRET])
@pytest.mark.parametrize("data", OTHER_PROGRAMS.values(), ids=OTHER_PROGRAMS)
def test_another_program_gets_no_number_and_delays_nobody(
    port: int, machines: list[Machine], monkeypatch: pytest.MonkeyPatch, data: bytes, secret: str
) -> None:
    monkeypatch.setenv("STOKER_RDZV_SECRET", secret)
    first = start_host(port, machines)
    other = connect(port)
    with contextlib.suppress(OSError):
        other.sendall(data)
    second = Machine(port)
    machines.append(second)
    assert first.end() == NodeGroup(2, 0, 0, 2, "127.0.0.1", 29999)
    assert second.end() == NodeGroup(2, 1, 1, 2, "127.0.0.1", 29999)
    heard = b""
    with contextlib.suppress(OSError):
        while more := other.recv(4096):
            heard += more
    assert b'"rank"' not in heard


@pytest.mark.parametrize(
    ("word", "why"),
    [
        (hello(job="other"), "another job"),
        (hello(count=3), "another job"),
        (b'{"version": 7}\n', "one version of Stoker"),
    ],
)
def test_another_job_or_version_is_told_why_it_is_refused(
    port: int, machines: list[Machine], word: bytes, why: str
) -> None:
    first = start_host(port, machines)
    guest = connect(port)
    guest.sendall(word)
    assert why in read_json_line(guest)["refused"]
    assert first.outcome is None


def test_a_slow_machine_is_waited_for(port: int, machines: list[Machine]) -> None:
    first = start_host(port, machines)
    guest = connect(port)
    for byte in hello():
        guest.sendall(bytes([byte]))
        time.sleep(0.01)
    assert read_json_line(guest)["rank"] == 1 and first.end() == NodeGroup(2, 0, 0, 2, "127.0.0.1", 29999)


def test_a_machine_that_was_stopped_may_come_again(port: int, machines: list[Machine]) -> None:
    first = start_host(port, machines, count=3)
    gone = connect(port)
    gone.sendall(hello(count=3))
    time.sleep(0.3)
    gone.close()
    others = [Machine(port, count=3) for _ in range(2)]
    machines += others
    assert first.end() == NodeGroup(3, 0, 0, 3, "127.0.0.1", 29999)
    assert sorted(machine.end().rank for machine in others) == [1, 2]


def serve(port: int, reply: bytes, times: int = 1) -> threading.Thread:
    """Listen at the endpoint and say the same to everybody."""
    ready = threading.Event()

    def answer() -> None:
        with socket.create_server(("127.0.0.1", port)) as listener:
            ready.set()
            for _ in range(times):
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    connection.recv(4096)
                    connection.sendall(reply)
                    connection.settimeout(1.0)
                    connection.recv(4096)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    assert ready.wait(PLENTY)
    return thread


@pytest.mark.parametrize(
    "reply", [b"[" * 4000 + b"\n", b"x" * 100_000, b"\xff\n", b"HTTP/1.1 400 Bad Request\r\n", b""]
)
def test_another_program_at_the_endpoint_is_tried_again(port: int, machines: list[Machine], reply: bytes) -> None:
    thread = serve(port, reply, 2)
    machine = Machine(port)
    machines.append(machine)
    thread.join(PLENTY)
    assert not thread.is_alive() and machine.outcome is None
    assert len(machine.lines) == 1 and machine.lines[0].isprintable()


@pytest.mark.parametrize("reply", [{"rank": "1"}, {"refused": "\x1b[2J\nstoker: all is well"}])
def test_an_answer_that_makes_no_sense_is_one_line(port: int, machines: list[Machine], reply: dict[str, Any]) -> None:
    serve(port, json.dumps(reply).encode() + b"\n")
    machine = Machine(port)
    machines.append(machine)
    refusal = machine.end()
    assert isinstance(refusal, Refusal) and refusal.line.isprintable()


# ---- the secret ----


def test_with_one_secret_they_meet(port: int, machines: list[Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_RDZV_SECRET", SECRET)
    first = start_host(port, machines, count=3, ranks=2)
    others = [Machine(port, count=3, ranks=2) for _ in range(2)]
    machines += others
    assert first.end() == NodeGroup(3, 0, 0, 6, "127.0.0.1", 29999)
    assert sorted((machine.end().rank, machine.end().first_rank) for machine in others) == [(1, 2), (2, 4)]


@pytest.mark.parametrize(("there", "here"), [(SECRET, ""), ("", SECRET), (SECRET, OTHER)])
def test_where_the_secrets_do_not_agree_both_sides_say_so(
    port: int, machines: list[Machine], monkeypatch: pytest.MonkeyPatch, there: str, here: str
) -> None:
    monkeypatch.setenv("STOKER_RDZV_SECRET", there)
    first = start_host(port, machines)
    monkeypatch.setenv("STOKER_RDZV_SECRET", here)
    second = Machine(port)
    machines.append(second)
    refusal = second.end()
    assert isinstance(refusal, Refusal) and "STOKER_RDZV_SECRET" in refusal.line, refusal
    assert any("127.0.0.1 was turned away" in line for line in first.lines) and first.outcome is None
    assert not any(secret in line for secret in (SECRET, OTHER) for line in [*first.lines, refusal.line])


def test_a_proof_of_another_meeting_is_worth_nothing(
    port: int, machines: list[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real guest's words, sent again with the same hello."""
    monkeypatch.setenv("STOKER_RDZV_SECRET", SECRET)
    start_host(port, machines, count=2, most=3)
    said = {"job": "job", "count": 2, "ranks": 1, "nonce": "n"}
    guest = connect(port)
    guest.sendall(json.dumps(said).encode() + b"\n")
    proof = Secret(SECRET.encode()).make_proof("guest", said, read_json_line(guest)["challenge"])
    replay = connect(port)
    replay.sendall(json.dumps(said).encode() + b"\n")
    assert "challenge" in read_json_line(replay)
    replay.sendall(json.dumps({"proof": proof}).encode() + b"\n")
    assert "the secrets differ" in read_json_line(replay)["refused"]


def test_the_other_sides_proof_can_not_be_sent_back(
    port: int, machines: list[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_RDZV_SECRET", SECRET)
    start_host(port, machines)
    guest = connect(port)
    said = {"job": "job", "count": 2, "ranks": 1, "nonce": "n"}
    guest.sendall(json.dumps(said).encode() + b"\n")
    proof = Secret(SECRET.encode()).make_proof("host", said, read_json_line(guest)["challenge"])
    guest.sendall(json.dumps({"proof": proof}).encode() + b"\n")
    assert "refused" in read_json_line(guest)


@pytest.mark.parametrize("fake", ["no challenge", "no proof", "wrong", "another answer"])
def test_a_machine_that_does_not_know_the_secret_hands_out_no_numbers(
    port: int, machines: list[Machine], monkeypatch: pytest.MonkeyPatch, fake: str
) -> None:
    monkeypatch.setenv("STOKER_RDZV_SECRET", SECRET)
    answer: dict[str, Any] = {"rank": 1, "first": 1, "world": 2, "port": 29999, "nodes": 2}

    def pretend() -> None:
        connection, _ = listener.accept()
        with connection:
            lines = connection.makefile()
            said = json.loads(lines.readline())
            if fake != "no challenge":
                connection.sendall(b'{"challenge": "c"}\n')
                lines.readline()
            if fake == "wrong":
                answer["proof"] = Secret(OTHER.encode()).make_proof("host", {**said, **answer}, "c")
            elif fake == "another answer":
                answer["proof"] = Secret(SECRET.encode()).make_proof("host", {**said, **answer, "port": 30000}, "c")
            connection.sendall(json.dumps(answer).encode() + b"\n")
            lines.readline()

    with socket.create_server(("127.0.0.1", port)) as listener:
        threading.Thread(target=pretend, daemon=True).start()
        machine = Machine(port)
        machines.append(machine)
        refusal = machine.end()
    assert isinstance(refusal, Refusal) and "secret" in refusal.line, refusal


@pytest.mark.parametrize("proof", [None, 7, "", "x" * 64, "é" * 32, ["a"], True])
def test_no_other_proof_fits(proof: Any) -> None:
    assert not Secret(SECRET.encode()).verifies(proof, "guest", {"a": 1}, "c")


def test_the_secret_may_be_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(SECRET + "\n")
    secret = find_secret({"STOKER_RDZV_SECRET_FILE": str(file)})
    assert secret is not None and secret.make_proof("guest", {}, "c") == Secret(SECRET.encode()).make_proof(
        "guest", {}, "c"
    )
    assert find_secret({}) is None
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo, 0o600)
    for environment, why in (
        ({"STOKER_RDZV_SECRET_FILE": str(file), "STOKER_RDZV_SECRET": SECRET}, "both set"),
        ({"STOKER_RDZV_SECRET": "short"}, "has only"),
        ({"STOKER_RDZV_SECRET_FILE": str(tmp_path / "none")}, "can't be read"),
        ({"STOKER_RDZV_SECRET_FILE": str(fifo)}, "can't be read"),
    ):
        with pytest.raises(Refusal, match=why) as refused:
            find_secret(environment)
        assert SECRET not in refused.value.line and "short" not in refused.value.line


def test_the_secret_is_neither_recorded_nor_given_to_ranks(stoker: Stoker, port: int) -> None:
    script = stoker.script(
        "s.py", "import os\nprint(sorted(name for name in os.environ if 'RDZV' in name), os.environ['WORLD_SIZE'])\n"
    )
    words = ("run", "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--nproc-per-node", "1")
    env = {**stoker.env, "STOKER_RDZV_SECRET": SECRET}
    both = [
        subprocess.Popen(
            [sys.executable, "-m", "stoker", *words, "--name", f"n{n}", script],
            cwd=stoker.cwd,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for n in range(2)
    ]
    outputs = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert all(b"[] 2" in output for output in outputs)
    files = [path for path in (stoker.cwd / "runs").rglob("*") if path.is_file()]
    assert files and not [path for path in files if SECRET.encode() in path.read_bytes()]


def test_a_launcher_outlives_other_programs_at_its_port(stoker: Stoker, port: int) -> None:
    script = stoker.script("s.py", "print('ran')\n")
    words = ("run", "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--nproc-per-node", "1")
    first = stoker.start(*words, "--name", "first", script)
    for data in OTHER_PROGRAMS.values():
        with connect(port) as connection, contextlib.suppress(OSError):
            connection.sendall(data)
    second = stoker.start(*words, "--name", "second", script)
    outputs = [process.communicate(timeout=60)[0] for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), outputs
    assert not any(b"Traceback" in output for output in outputs)


def test_another_users_listener_at_the_endpoint_is_not_joined(
    port: int, machines: list[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks would be our peers."""
    monkeypatch.setattr(rendezvous, "find_answering_users", lambda connection: {12345})
    with socket.create_server(("127.0.0.1", port)):
        machines.append(Machine(port))
        refusal = machines[-1].end()
    assert isinstance(refusal, Refusal) and "this launch joins only its own user" in refusal.line
