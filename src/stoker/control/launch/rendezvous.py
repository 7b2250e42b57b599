"""Numbers machines that are started by hand, in a rendezvous at --rdzv-endpoint. Used by `control/plan/targets.py`.

The machine that has the address listens, numbers the others in the order of their connections, and sends each its
number. Each message is one line of JSON:

    guest → {"job", "count", "ranks"}     → {"rank", "first", "world", "port", "nodes"}, or {"refused": why}

With a secret both sides prove that they know it, by an HMAC over two fresh random numbers and all messages before:

    guest → {"job", "count", "ranks", "nonce"}   → {"challenge"}   → {"proof"}   → {"rank", ..., "proof"}
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from stoker.contract import typed_values
from stoker.contract.env_vars import RDZV_SECRET, RDZV_SECRET_FILE
from stoker.contract.errors import EX_CONFIG, EX_TEMPFAIL, EX_UNAVAILABLE, Refusal
from stoker.contract.listeners import find_answering_users
from stoker.contract.safe_io import is_trusted, read_text, user_name
from stoker.contract.text import escape, parse_json
from stoker.contract.units import format_duration, plural
from stoker.control.plan.targets import NodeGroup, RendezvousConfig

JOIN_TIMEOUT_S = 600.0  # torchrun's default, too
RETRY_S = 0.5
POLL_S = 0.1
MAX_LINE = 4096  # bytes; a message has a few hundred
MIN_SECRET = 16  # characters
GUEST, HOST = "guest", "host"  # the sides of a proof
_HELLO = {"job": "str", "count": "int", "ranks": "Count", "nonce?": "str"}
_ANSWER = {"rank": "int", "first": "int", "world": "int", "port": "int", "nodes": "int"}


def join_machines(
    config: RendezvousConfig,
    ranks: int,
    store_port: Callable[[], int],
    on_wait: Callable[[], None],
    log: Callable[[str], None],
) -> NodeGroup:
    """Join the other machines and return this one's number and ranks among them.

    `store_port` reserves rank 0's store port, on the machine that becomes number 0. `on_wait` is called often while waiting.
    """
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    secret = find_secret(os.environ)
    try:
        family, kind, _, _, address = socket.getaddrinfo(config.address, config.port, type=socket.SOCK_STREAM)[0]
    except OSError as problem:
        raise _refusal(config, str(problem.strerror)) from problem
    with socket.socket(family, kind) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)  # works only on the machine with the address, which is number 0
            listener.listen(1024)
        except OSError:
            return _join(config, ranks, secret, address, family, deadline, on_wait, log)
        log(f"stoker: waiting at {config.address}:{config.port} for {_describe_others(config)}")
        with _Host(config, ranks, listener, secret, log) as host:
            host.wait(deadline, on_wait)
            return host.number_machines(store_port())


def _refusal(config: RendezvousConfig, why: str, code: int = EX_UNAVAILABLE) -> Refusal:
    return Refusal(f"--rdzv-endpoint {config.address}:{config.port}: {why}", code, cause="launch.nodes")


def _describe_others(config: RendezvousConfig) -> str:
    if config.max_count <= config.count:
        return f"{config.count - 1} more machine(s)"
    at_least = f"{config.count - 1} to " if config.count > 1 else "up to "
    return f"{at_least}{config.max_count - 1} more machine(s), {format_duration(config.last_call_s)} after the last required one"


# ---- the machine at the endpoint ----


class _Guest:
    """A connection. It may be any program's until it has sent a hello, and the proof if there is a secret."""

    def __init__(self, connection: socket.socket, address: str) -> None:
        self.connection = connection
        self.address = address
        self.data = b""  # received and not parsed yet
        self.hello: dict[str, Any] = {}
        self.challenge = ""
        self.accepted = False

    def send(self, message: dict[str, Any]) -> bool:
        """Send a line, which fits into any socket's buffer. Returns False if the guest is gone."""
        try:
            self.connection.send(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True


class _Host:
    """Accepts and numbers the machines that join."""

    def __init__(
        self,
        config: RendezvousConfig,
        ranks: int,
        listener: socket.socket,
        secret: Secret | None,
        log: Callable[[str], None],
    ) -> None:
        self._config, self._ranks, self._listener, self._secret, self._log = config, ranks, listener, secret, log
        self._accepted: list[_Guest] = []  # in the order of their numbers
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> _Host:
        return self

    def __exit__(self, *problem: object) -> None:
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                self._drop(key.data)
        self._selector.close()

    def wait(self, deadline: float, on_wait: Callable[[], None]) -> None:
        """Wait until the maximum of machines has joined, or the minimum and the last call is over."""
        config = self._config
        last_call_ends = 0.0  # 0: fewer than the minimum have joined
        while len(self._accepted) < max(config.max_count, config.count) - 1:
            on_wait()
            now = time.monotonic()
            if len(self._accepted) < config.count - 1:
                last_call_ends = 0.0
            elif not last_call_ends:
                last_call_ends = now + config.last_call_s
            elif now > last_call_ends:
                return
            if not last_call_ends and now > deadline:
                came = f"{len(self._accepted) + 1} of {config.count} machines joined at {config.address}:{config.port}"
                raise Refusal(f"{came} within {format_duration(JOIN_TIMEOUT_S)}", EX_TEMPFAIL, cause="launch.nodes")
            for key, _ in self._selector.select(POLL_S):
                if key.data is None:
                    self._accept_connection()
                elif len(self._accepted) < max(config.max_count, config.count) - 1:
                    self._receive_from(key.data)

    def _accept_connection(self) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError:  # the guest is already gone
            return
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ, _Guest(connection, str(address[0])))

    def _receive_from(self, guest: _Guest) -> None:
        try:
            data = guest.connection.recv(MAX_LINE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        guest.data += data
        # A guest that is gone may have been stopped. It joins again when it is restarted.
        if not data or len(guest.data) > MAX_LINE:
            self._drop(guest)
            return
        line, end, rest = guest.data.partition(b"\n")
        if end and not guest.accepted:
            guest.data = rest
            self._answer_guest(guest, parse_message(line))

    def _answer_guest(self, guest: _Guest, message: dict[str, Any]) -> None:
        if guest.challenge:
            assert self._secret is not None
            if self._secret.verifies(message.get("proof"), GUEST, guest.hello, guest.challenge):
                self._accept(guest)
            else:
                self._turn_away(guest, "the secrets differ (STOKER_RDZV_SECRET)")
            return
        try:
            guest.hello = typed_values.read_fields(_HELLO, message)
        except ValueError as problem:
            if message:
                guest.send({"refused": f"use one version of Stoker on all machines ({problem})"})
            self._drop(guest)  # another program, which is not reported
            return
        config, hello = self._config, guest.hello
        if hello["job"] != config.name or hello["count"] != config.count:
            job = f"{config.count} machines, --rdzv-id {config.name or 'none'}"
            guest.send({"refused": f"another job uses that endpoint: {job}"})
            self._drop(guest)
        elif self._secret is None and "nonce" in hello:
            self._turn_away(guest, "only it has a secret (STOKER_RDZV_SECRET), not the machine at the endpoint")
        elif self._secret is not None and "nonce" not in hello:
            self._turn_away(guest, "only the machine at the endpoint has a secret (STOKER_RDZV_SECRET)")
        elif self._secret is not None:
            guest.challenge = self._secret.make_nonce()
            guest.send({"challenge": guest.challenge})
        else:
            self._accept(guest)

    def _accept(self, guest: _Guest) -> None:
        guest.accepted = True
        self._accepted.append(guest)

    def _turn_away(self, guest: _Guest, why: str) -> None:
        guest.send({"refused": why})
        self._log(f"stoker: machine {guest.address} was turned away: {why}")
        self._drop(guest)

    def _drop(self, guest: _Guest) -> None:
        if guest.accepted:
            self._accepted.remove(guest)
        self._selector.unregister(guest.connection)
        guest.connection.close()

    def number_machines(self, port: int) -> NodeGroup:
        """Send all machines their numbers. This machine has the first ranks, then the others in the order they joined."""
        config = self._config
        world_size = self._ranks + sum(guest.hello["ranks"] for guest in self._accepted)
        first, nodes = self._ranks, 1 + len(self._accepted)
        for rank, guest in enumerate(self._accepted, 1):
            answer: dict[str, Any] = {"rank": rank, "first": first, "world": world_size, "port": port, "nodes": nodes}
            if self._secret is not None:
                answer["proof"] = self._secret.make_proof(HOST, {**guest.hello, **answer}, guest.challenge)
            if not guest.send(answer):
                left = f"machine {guest.address} left {config.address}:{config.port} while the ranks were numbered"
                raise Refusal(f"{left}; start all of them again", EX_TEMPFAIL, cause="launch.nodes")
            first += guest.hello["ranks"]
        return NodeGroup(nodes, 0, 0, world_size, config.address, port)


# ---- a machine that joins ----


def _refuse_others(connection: socket.socket, config: RendezvousConfig) -> None:
    """Raise Refusal if another user of this machine listens at the endpoint: the job would run with that user's ranks."""
    others = sorted(uid for uid in find_answering_users(connection) if not is_trusted(uid, os.curdir))
    if others:
        holder = f"port {config.port} is in use by {user_name(others[0])}, and this launch joins only its own user's"
        raise _refusal(config, f"{holder}: choose another port")


def _join(
    config: RendezvousConfig,
    ranks: int,
    secret: Secret | None,
    address: Any,
    family: int,
    deadline: float,
    on_wait: Callable[[], None],
    log: Callable[[str], None],
) -> NodeGroup:
    """Connect until the machine at the endpoint, which may not listen yet, has numbered this one."""
    is_reported = False
    while True:
        problem = "it closed the connection"
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(2.0)
            try:
                connection.connect(address)
                _refuse_others(connection, config)
                nodes = _introduce(connection, config, ranks, secret, deadline, on_wait)
                if nodes is not None:
                    return nodes
            except OSError as error:
                problem = error.strerror or str(error)
            except ValueError as error:
                problem = f"another program listens there: {error}"
        if not is_reported:
            is_reported = True
            nobody = f"no answer from {config.address}:{config.port} yet ({problem})"
            log(f"stoker: {nobody}; trying for up to {format_duration(JOIN_TIMEOUT_S)}")
        if time.monotonic() > deadline:
            raise _refusal(config, f"no answer within {format_duration(JOIN_TIMEOUT_S)}: {problem}", EX_TEMPFAIL)
        until = time.monotonic() + RETRY_S
        while time.monotonic() < until:
            on_wait()


def _introduce(
    connection: socket.socket,
    config: RendezvousConfig,
    ranks: int,
    secret: Secret | None,
    deadline: float,
    on_wait: Callable[[], None],
) -> NodeGroup | None:
    """Send the hello and return this machine's number and ranks, or None if the other side is gone and may come back."""
    hello: dict[str, Any] = {"job": config.name, "count": config.count, "ranks": ranks}
    if secret is not None:
        hello["nonce"] = secret.make_nonce()
    _send(connection, hello)
    message = _receive(connection, config, deadline, on_wait)
    challenge = message.get("challenge", "")
    if message and bool(challenge) != (secret is not None):
        line = "only one of this machine and the one at the endpoint has a secret"
        raise _refusal(config, f"{line}; set the same STOKER_RDZV_SECRET on all machines, or on none")
    if secret is not None and message:
        _send(connection, {"proof": secret.make_proof(GUEST, hello, str(challenge))})
        message = _receive(connection, config, deadline, on_wait)
    if not message:
        return None
    try:
        answer = typed_values.read_fields(_ANSWER, message)
    except ValueError as problem:
        raise _refusal(config, f"its response is not valid: {problem}") from None
    if secret is not None and not secret.verifies(message.get("proof"), HOST, {**hello, **answer}, str(challenge)):
        raise _refusal(config, "the machine at the endpoint does not know the secret (STOKER_RDZV_SECRET)")
    return NodeGroup(answer["nodes"], answer["rank"], answer["first"], answer["world"], config.address, answer["port"])


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(
    connection: socket.socket, config: RendezvousConfig, deadline: float, on_wait: Callable[[], None]
) -> dict[str, Any]:
    """Return the next message, or {} if the other side is gone or the time is over. Raises ValueError for other text.

    It waits in short steps, so that signals and pings are handled in between.
    """
    connection.settimeout(POLL_S)
    data = b""
    while b"\n" not in data:
        if time.monotonic() > deadline:
            return {}
        on_wait()
        try:
            received = connection.recv(MAX_LINE)
        except TimeoutError:
            continue
        except OSError:
            return {}
        if not received:
            return {}
        data += received
        if len(data) > MAX_LINE:
            break
    message = parse_message(data.partition(b"\n")[0])
    if not message:
        raise ValueError(f"it sent {data[:60]!a}")
    if "refused" in message:
        raise _refusal(config, escape(str(message["refused"]), 500))
    return message


def parse_message(line: bytes) -> dict[str, Any]:
    """Return the message in a line, or {} if it has none."""
    try:
        message = parse_json(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}


# ---- the secret ----


class Secret:
    """A secret that all machines of a job know. It is never sent, and a proof is valid for one rendezvous only."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def make_nonce(self) -> str:
        return secrets.token_hex(16)

    def make_proof(self, side: str, messages: Mapping[str, Any], challenge: str) -> str:
        """Return one side's proof over all messages. It differs from the other side's, so it can't be sent back."""
        text = json.dumps(["stoker-rdzv-1", side, challenge, dict(messages)], sort_keys=True, separators=(",", ":"))
        return hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()

    def verifies(self, proof: Any, side: str, messages: Mapping[str, Any], challenge: str) -> bool:
        expected = self.make_proof(side, messages, challenge)
        return isinstance(proof, str) and proof.isascii() and hmac.compare_digest(proof, expected)


def find_secret(environment: Mapping[str, str]) -> Secret | None:
    """Return the secret from STOKER_RDZV_SECRET or the file of STOKER_RDZV_SECRET_FILE, or None if neither is set."""
    value, path = environment.get(RDZV_SECRET, ""), environment.get(RDZV_SECRET_FILE, "")
    if value and path:
        raise _bad_secret(f"{RDZV_SECRET} and {RDZV_SECRET_FILE} are both set; unset one of them")
    if path:
        try:
            value = read_text(os.path.expanduser(path), errors="surrogateescape")
        except OSError as problem:
            raise _bad_secret(f"{RDZV_SECRET_FILE}={path} can't be read: {problem.strerror}") from problem
        if not value.strip():
            raise _bad_secret(f"{RDZV_SECRET_FILE}={path} is empty")
    key = value.strip()
    if not key:
        return None
    if len(key) < MIN_SECRET:
        better = f"give {MIN_SECRET} or more, as from `openssl rand -hex 32`"
        variable = RDZV_SECRET_FILE if path else RDZV_SECRET
        raise _bad_secret(f"{variable} has only {plural(len(key), 'character')}; {better}")
    return Secret(key.encode("utf-8", "surrogateescape"))


def _bad_secret(line: str) -> Refusal:
    return Refusal(line, EX_CONFIG, cause="launch.nodes")
