"""Where machines started by hand meet, anybody may knock. Strangers delay nobody, end nothing and get no number; with a secret, liars don't either."""

from __future__ import annotations

import contextlib
import json
import os
import random
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
from stoker.contract.names import Refusal
from stoker.control.launch import rendezvous
from stoker.control.launch.nodes import Meeting, Nodes
from stoker.control.launch.rendezvous import Secret, find_secret

SECRET, OTHER = "0123456789abcdef" * 4, "another secret, as long as it must be"
SOON = 5.0
PLENTY = 100.0  # less than a test's own limit


class Machine:
    """One that meets others, in a thread."""

    def __init__(self, port: int, count: int = 2, ranks: int = 1, name: str = "job", most: int = 0) -> None:
        self.lines: list[str] = []
        self.found: Nodes | BaseException | None = None
        self._stop = False
        told = Meeting(count, None, "127.0.0.1", port, name, most)

        def rest() -> None:
            time.sleep(0.005)
            if self._stop:
                raise InterruptedError("the test is over")

        def meet() -> None:
            try:
                self.found = rendezvous.meet(told, ranks, lambda: 29999, rest, self.lines.append)
            except BaseException as problem:
                self.found = problem

        self._thread = threading.Thread(target=meet, daemon=True)
        self._thread.start()

    def end(self) -> Any:
        self._thread.join(PLENTY)
        return self.found

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
    for one in made:
        one.stop()


def knock(port: int) -> socket.socket:
    def once() -> socket.socket | None:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=PLENTY)
        except ConnectionRefusedError:
            return None

    made = wait_for(once, SOON)
    assert made is not None
    return made


def hello(**more: Any) -> bytes:
    return json.dumps({"job": "job", "count": 2, "ranks": 1, **more}).encode() + b"\n"


def host(port: int, machines: list[Machine], **more: Any) -> Machine:
    """It owns the address by the time this returns."""
    one = Machine(port, **more)
    machines.append(one)
    assert wait_for(lambda: True if one.lines or one.found else None, SOON)
    return one


BAD_HELLOS = {
    "deep list": b"[" * 4000 + b"\n",
    "deep object": b'{"job":' * 500 + b"\n",
    "too long": b"x" * 100_000,
    "too long a line": b'{"job":"' + b"x" * 100_000 + b'"}\n',
    "not UTF-8": b"\xff\xfe\n",
    "NUL": b"\0\n",
    "empty": b"\n",
    "null": b"null\n",
    "a list": b"[]\n",
    "a number": b"7\n",
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "TLS": bytes.fromhex("16030100c8010000c40303") + b"\n",
    "ssh": b"SSH-2.0-OpenSSH_9.6\r\n",
    "-1 ranks": hello(ranks=-1),
    "0 ranks": hello(ranks=0),
    "true ranks": hello(ranks=True),
    "a billion ranks": hello(ranks=10**9),
    "10^40 ranks": hello(ranks=10**40),
    "1.0 ranks": hello(ranks=1.0),
    "NaN ranks": hello(ranks=float("nan")),
    "text ranks": hello(ranks="1"),
    "a list of ranks": hello(ranks=[1]),
    "no ranks": b'{"job": "job", "count": 2}\n',
    "another job": hello(job="other"),
    "no job": b'{"count": 2, "ranks": 1}\n',
    "a list of jobs": hello(job=["job"]),
    "another count": hello(count=3),
    "a count of text": hello(count="2"),
    "a nonce": hello(nonce="x"),
    "a nonce that is none": hello(nonce=7),
    "a proof at once": b'{"proof": "x"}\n',
    "an answer": b'{"rank": 1, "first": 1, "world": 2, "port": 1, "nodes": 2}\n',
    "a refusal": b'{"refused": "go away"}\n',
}


@pytest.mark.parametrize("secret", ["", SECRET])
@pytest.mark.parametrize("data", BAD_HELLOS.values(), ids=BAD_HELLOS)
def test_a_stranger_gets_no_number_and_the_machine_behind_it_does(
    port: int, machines: list[Machine], monkeypatch: pytest.MonkeyPatch, data: bytes, secret: str
) -> None:
    monkeypatch.setenv("STOKER_RDZV_SECRET", secret)
    first = host(port, machines)
    stranger = knock(port)
    with contextlib.suppress(OSError):
        stranger.sendall(data)
    second = Machine(port)
    machines.append(second)
    assert first.end() == Nodes(2, 0, 0, 2, "127.0.0.1", 29999) and second.end() == Nodes(
        2, 1, 1, 2, "127.0.0.1", 29999
    )
    heard = b""
    with contextlib.suppress(OSError):
        while more := stranger.recv(4096):
            heard += more
    assert b'"rank"' not in heard and all(len(line) < 300 and line.isprintable() for line in first.lines)


def test_strangers_that_hold_their_connections_delay_nobody(
    port: int, machines: list[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_HELLO_S", 10 * PLENTY)  # who waits for one of them never comes to an end here
    first = host(port, machines, count=3)
    strangers = []
    for number in range(200):  # more than are kept
        strangers.append(knock(port))
        with contextlib.suppress(OSError):
            strangers[-1].sendall([b"", b"{", b'{"job": "jo'][number % 3])
    others = [Machine(port, count=3) for _ in range(2)]
    machines += others
    assert isinstance(first.end(), Nodes) and {one.end().rank for one in others} == {1, 2}
    for one in strangers:
        one.close()


def test_connections_are_limited_in_number(port: int, machines: list[Machine]) -> None:
    host(port, machines)
    before = len(os.listdir("/proc/self/fd"))
    ours = [knock(port) for _ in range(300)]
    time.sleep(0.5)
    assert len(os.listdir("/proc/self/fd")) - before < 300 + rendezvous._MOST_STRANGERS + 10
    for one in ours:
        one.close()


@pytest.mark.parametrize("seed", range(10))
def test_fuzzed_lines_end_nothing(
    port: int, machines: list[Machine], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    monkeypatch.setenv("STOKER_RDZV_SECRET", SECRET if seed % 2 else "")
    first = host(port, machines)
    for _ in range(30):
        line = bytearray(
            rng.choice([hello(job="x"), hello(job="x", nonce="ab"), b'{"proof": "00"}\n', hello(job="y", ranks=3)])
        )
        for _ in range(rng.randint(1, 6)):
            at = rng.randrange(len(line))
            line[at : at + rng.randint(0, 3)] = rng.choice(
                [b"[", b"{", b'"', b"\n", b"\0", b"\xff", b"9" * 30, b"-", b"true", b"[" * 500]
            )
        with knock(port) as way, contextlib.suppress(OSError):
            way.sendall(bytes(line))
    assert first.found is None
    second = Machine(port)
    machines.append(second)
    assert isinstance(first.end(), Nodes) and isinstance(second.end(), Nodes)


# ---- what the machine at the endpoint answers ----

BAD_ANSWERS = {
    "rank 0": {"rank": 0},
    "rank -1": {"rank": -1},
    "rank 2 of 2": {"rank": 2},
    "rank true": {"rank": True},
    "rank text": {"rank": "1"},
    "first 0": {"first": 0},
    "first -5": {"first": -5},
    "first beyond": {"first": 2},
    "world 1": {"world": 1},
    "world of a billion": {"world": 10**9},
    "world text": {"world": "2"},
    "port 0": {"port": 0},
    "port 70000": {"port": 70000},
    "port -1": {"port": -1},
    "port text": {"port": "29500"},
    "port true": {"port": True},
    "nodes 1": {"nodes": 1},
    "nodes 3": {"nodes": 3},
    "nodes 10^30": {"nodes": 10**30},
    "nothing": {"rank": None, "first": None},
}


def server(port: int, reply: bytes, times: int = 1) -> threading.Thread:
    """Stands at the endpoint and says the same to everybody."""
    ready = threading.Event()

    def serve() -> None:
        with socket.create_server(("127.0.0.1", port)) as own:
            ready.set()
            for _ in range(times):
                way, _ = own.accept()
                with way, contextlib.suppress(OSError):
                    way.recv(4096)
                    way.sendall(reply)
                    way.settimeout(1.0)
                    way.recv(4096)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert ready.wait(PLENTY)
    return thread


@pytest.mark.parametrize("change", BAD_ANSWERS.values(), ids=BAD_ANSWERS)
def test_an_answer_out_of_range_is_refused(port: int, machines: list[Machine], change: dict[str, Any]) -> None:
    server(port, json.dumps({"rank": 1, "first": 1, "world": 2, "port": 29999, "nodes": 2, **change}).encode() + b"\n")
    one = Machine(port)
    machines.append(one)
    found = one.end()
    assert isinstance(found, Refusal) and "its answer can't be used" in found.line and found.line.isprintable(), found


@pytest.mark.parametrize(
    "reply",
    [
        b"[" * 4000 + b"\n",
        b"x" * 100_000,
        b"\xff\n",
        b"HTTP/1.1 400 Bad Request\r\n",
        b"\n",
        b"[]\n",
        b"",
        b'{"a":' * 600 + b"\n",
    ],
)
def test_nonsense_at_the_endpoint_is_tried_again(port: int, machines: list[Machine], reply: bytes) -> None:
    thread = server(port, reply, 2)
    one = Machine(port)
    machines.append(one)
    thread.join(PLENTY)
    assert (
        not thread.is_alive()
        and one.found is None
        and len(one.lines) == 1
        and one.lines[0].isprintable()
        and len(one.lines[0]) < 400
    )


def test_a_refusal_is_printed_without_control_codes(port: int, machines: list[Machine]) -> None:
    server(port, json.dumps({"refused": "\x1b[2J\nstoker: all is well" + "x" * 3000}).encode() + b"\n")
    one = Machine(port)
    machines.append(one)
    found = one.end()
    assert isinstance(found, Refusal) and found.line.isprintable() and len(found.line) < 700


# ---- the secret ----


def proofs(way: socket.socket) -> Any:
    return json.loads(way.makefile().readline())


def test_with_one_secret_they_meet(port: int, machines: list[Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_RDZV_SECRET", SECRET)
    first = host(port, machines, count=3, ranks=2)
    others = [Machine(port, count=3, ranks=2) for _ in range(2)]
    machines += others
    assert first.end() == Nodes(3, 0, 0, 6, "127.0.0.1", 29999)
    assert sorted((one.end().rank, one.end().first) for one in others) == [(1, 2), (2, 4)]


@pytest.mark.parametrize(
    ("there", "here", "says", "there_says"),
    [
        (SECRET, "", "has a secret (STOKER_RDZV_SECRET), and it has none", "has a secret"),
        (
            "",
            SECRET,
            "it has a secret (STOKER_RDZV_SECRET) and the machine at the endpoint has none",
            "it has a secret",
        ),
        (SECRET, OTHER, "the secrets differ", "the secrets differ"),
    ],
)
def test_where_the_secrets_do_not_agree_both_sides_say_so(
    port: int,
    machines: list[Machine],
    monkeypatch: pytest.MonkeyPatch,
    there: str,
    here: str,
    says: str,
    there_says: str,
) -> None:
    monkeypatch.setenv("STOKER_RDZV_SECRET", there)
    first = host(port, machines)
    monkeypatch.setenv("STOKER_RDZV_SECRET", here)
    second = Machine(port)
    machines.append(second)
    found = second.end()
    assert isinstance(found, Refusal) and says in found.line, found
    assert (
        any("127.0.0.1 was turned away" in line and there_says in line for line in first.lines) and first.found is None
    )
    assert not any(secret in line for secret in (SECRET, OTHER) for line in [*first.lines, found.line])


def test_a_proof_that_was_overheard_is_worth_nothing(
    port: int, machines: list[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real guest's words, sent again by a stranger: to the same machine, with the same hello."""
    monkeypatch.setenv("STOKER_RDZV_SECRET", SECRET)
    host(port, machines, count=2, most=3)
    said = {"job": "job", "count": 2, "ranks": 1, "nonce": "n"}
    good = knock(port)
    good.sendall(json.dumps(said).encode() + b"\n")
    proof = Secret(SECRET.encode()).proof("guest", said, proofs(good)["challenge"])
    replay = knock(port)
    replay.sendall(json.dumps(said).encode() + b"\n")
    assert "challenge" in proofs(replay)
    replay.sendall(json.dumps({"proof": proof}).encode() + b"\n")
    assert "the secrets differ" in proofs(replay)["refused"]


def test_the_other_sides_proof_can_not_be_sent_back(
    port: int, machines: list[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_RDZV_SECRET", SECRET)
    host(port, machines)
    way = knock(port)
    said = {"job": "job", "count": 2, "ranks": 1, "nonce": "n"}
    way.sendall(json.dumps(said).encode() + b"\n")
    way.sendall(
        json.dumps({"proof": Secret(SECRET.encode()).proof("host", said, proofs(way)["challenge"])}).encode() + b"\n"
    )
    assert "refused" in proofs(way)


@pytest.mark.parametrize("fake", ["none", "wrong", "another answer"])
def test_a_machine_that_does_not_know_the_secret_hands_out_no_numbers(
    port: int, machines: list[Machine], monkeypatch: pytest.MonkeyPatch, fake: str
) -> None:
    monkeypatch.setenv("STOKER_RDZV_SECRET", SECRET)

    def serve() -> None:
        way, _ = own.accept()
        with way:
            reader = way.makefile()
            said = json.loads(reader.readline())
            way.sendall(b'{"challenge": "c"}\n')
            reader.readline()
            answer = {"rank": 1, "first": 1, "world": 2, "port": 29999, "nodes": 2}
            if fake == "wrong":
                answer["proof"] = Secret(OTHER.encode()).proof("host", {**said, **answer}, "c")  # type: ignore[assignment]
            elif fake == "another answer":
                answer["proof"] = Secret(SECRET.encode()).proof("host", {**said, **answer, "port": 30000}, "c")  # type: ignore[assignment]
            way.sendall(json.dumps(answer).encode() + b"\n")
            reader.readline()

    with socket.create_server(("127.0.0.1", port)) as own:
        threading.Thread(target=serve, daemon=True).start()
        one = Machine(port)
        machines.append(one)
        found = one.end()
    assert isinstance(found, Refusal) and "does not know the secret" in found.line, found


@pytest.mark.parametrize("proof", [None, 7, "", "x" * 64, "é" * 32, ["a"], True])
def test_no_other_proof_fits(proof: Any) -> None:
    assert not Secret(SECRET.encode()).fits(proof, "guest", {"a": 1}, "c")


def test_the_secret_may_be_in_a_file_that_nobody_else_reads(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(SECRET + "\n")
    file.chmod(0o600)
    found = find_secret({"STOKER_RDZV_SECRET_FILE": str(file)})
    assert found is not None and found.proof("guest", {}, "c") == Secret(SECRET.encode()).proof("guest", {}, "c")
    assert find_secret({}) is None
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo, 0o600)
    for change, says in (
        ({"STOKER_RDZV_SECRET_FILE": str(file), "STOKER_RDZV_SECRET": SECRET}, "both set"),
        ({"STOKER_RDZV_SECRET": "short"}, "can be guessed"),
        ({"STOKER_RDZV_SECRET_FILE": str(tmp_path / "none")}, "can't be read"),
        ({"STOKER_RDZV_SECRET_FILE": str(fifo)}, "can't be read"),
    ):
        with pytest.raises(Refusal, match=says) as refused:
            find_secret(change)
        assert SECRET not in refused.value.line and "short" not in refused.value.line
    file.chmod(0o644)
    with pytest.raises(Refusal, match="chmod 600"):
        find_secret({"STOKER_RDZV_SECRET_FILE": str(file)})


def test_the_secret_is_neither_recorded_nor_given_to_ranks(stoker: Stoker, port: int) -> None:
    script = stoker.script(
        "s.py", "import os\nprint(sorted(name for name in os.environ if 'RDZV' in name), os.environ['WORLD_SIZE'])\n"
    )
    where = ("run", "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--nproc-per-node", "1")
    env = {**stoker.env, "STOKER_RDZV_SECRET": SECRET}
    both = [
        subprocess.Popen(
            [sys.executable, "-m", "stoker", *where, "--name", f"n{n}", script],
            cwd=stoker.cwd,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for n in range(2)
    ]
    said = [one.communicate(timeout=60)[0] for one in both]
    assert [one.returncode for one in both] == [0, 0], said
    assert all(b"[] 2" in one for one in said)
    files = [path for path in (stoker.cwd / "runs").rglob("*") if path.is_file()]
    assert files and not [path for path in files if SECRET.encode() in path.read_bytes()]


def test_the_launcher_outlives_strangers(stoker: Stoker, port: int) -> None:
    """Whole commands, with what ended them before."""
    script = stoker.script("s.py", "print('ran')\n")
    where = ("run", "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--nproc-per-node", "1")
    first = stoker.start(*where, "--name", "first", script)
    for data in BAD_HELLOS.values():
        with knock(port) as way, contextlib.suppress(OSError):
            way.sendall(data)
    second = stoker.start(*where, "--name", "second", script)
    said = [one.communicate(timeout=60)[0] for one in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0) and not any(b"Traceback" in one for one in said), said
