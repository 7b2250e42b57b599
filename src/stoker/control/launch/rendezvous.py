"""Machines started by hand without numbers: they meet at --rdzv-endpoint. Who owns that address listens, numbers the others as they come
and tells everybody. One line of JSON from each, one back; the listening ends with that.

    guest → {"job", "count", "ranks"}                 → {"rank", "first", "world", "port", "nodes"}, or {"refused": why}

Anybody who reaches the port may speak, so nothing that is said there is believed before it is checked, and nobody is waited for: every
guest has its own few seconds to introduce itself. With a secret both sides prove that they know it, for this meeting only:

    guest → {"job", "count", "ranks", "nonce"}   → {"challenge"}   → {"proof"}   → {"rank", ..., "proof"}
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import selectors
import socket
import stat
import time
from collections.abc import Callable, Mapping
from typing import Any

from stoker.contract import listeners, owners, typed
from stoker.contract.names import EX_CONFIG, EX_TEMPFAIL, EX_UNAVAILABLE, RDZV_SECRET, RDZV_SECRET_FILE, Refusal
from stoker.contract.quantities import counted, span
from stoker.contract.safe_io import open_regular
from stoker.contract.text import parse_json, printable
from stoker.control.launch.nodes import Meeting, Nodes

PATIENCE_S = 600.0  # torchrun's
AGAIN_S = 0.5
POLL_S = 0.1
LONGEST = 4096  # bytes of a line
MOST_RANKS = 1 << 16  # of one machine; more processes than any kernel starts
GUEST, HOST = "guest", "host"  # whose proof
_ANSWER = {"rank": "int", "first": "int", "world": "int", "port": "int", "nodes": "int"}
_HELLO_S = 5.0
_MOST_STRANGERS = 64  # connections that have not introduced themselves, or not proved that they know the secret
_MOST_LINES = 10  # about who was turned away

_HELLO = {"job": "str", "count": "int", "ranks": "int", "nonce?": "str"}


def meet(
    told: Meeting, ranks: int, store_port: Callable[[], int], rest: Callable[[], None], say: Callable[[str], None]
) -> Nodes:
    """`store_port`: reserves rank 0's store port, on the machine that becomes 0. `rest`: called while waiting."""
    deadline = time.monotonic() + PATIENCE_S
    secret = find_secret(os.environ)
    family, kind, _, _, where = _resolve(told)
    with socket.socket(family, kind) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            own.bind(where)  # only its owner can: that machine is number 0
            own.listen(1024)
        except OSError:
            return Asking(told, ranks, secret, rest).ask(where, family, deadline, say)
        say(f"stoker: waiting at {told.address}:{told.port} for {_more(told)}")
        with _Receiving(told, ranks, own, secret, say) as receiving:
            receiving.wait(deadline, rest)
            return receiving.number(store_port())


def _resolve(told: Meeting) -> Any:
    try:
        return socket.getaddrinfo(told.address, told.port, type=socket.SOCK_STREAM)[0]
    except OSError as problem:
        raise _refusal(told, str(problem.strerror)) from problem


def _refusal(told: Meeting, why: str, code: int = EX_UNAVAILABLE) -> Refusal:
    return Refusal(f"--rdzv-endpoint {told.address}:{told.port}: {why}", code, cause="launch.nodes")


def _more(told: Meeting) -> str:
    if told.most <= told.count:
        return f"{told.count - 1} more machine(s)"
    at_least = f"{told.count - 1} to " if told.count > 1 else "up to "
    return f"{at_least}{told.most - 1} more machine(s), {span(told.last_call)} after the last that is needed"


class _Guest:
    """A connection: a stranger until it has said who it is, and with a secret proved it."""

    def __init__(self, way: socket.socket, address: str) -> None:
        self.way = way
        self.address = address
        self.network = _network(address)
        self.until = time.monotonic() + _HELLO_S
        self.data = b""
        self.hello: dict[str, Any] = {}
        self.challenge = ""
        self.accepted = False


def _network(address: str) -> str:
    """One machine has 2^64 addresses of IPv6: those count as one."""
    if ":" not in address or "." in address:
        return address
    return socket.inet_pton(socket.AF_INET6, address.partition("%")[0])[:8].hex()


def _least_wanted(strangers: list[_Guest]) -> _Guest:
    """Of the address with the most the oldest, without a hello first: who means it says it at once, and returns."""
    networks = [guest.network for guest in strangers]
    return min(strangers, key=lambda guest: (-networks.count(guest.network), bool(guest.hello)))


class _Receiving:
    def __init__(
        self, told: Meeting, ranks: int, own: socket.socket, secret: Secret | None, say: Callable[[str], None]
    ) -> None:
        self._told, self._ranks, self._own, self._secret, self._say = told, ranks, own, secret, say
        self._guests: dict[socket.socket, _Guest] = {}  # in the order in which they came
        self._accepted: list[_Guest] = []
        self._lines: set[str] = set()
        self._selector = selectors.DefaultSelector()
        own.setblocking(False)
        self._selector.register(own, selectors.EVENT_READ)

    def __enter__(self) -> _Receiving:
        return self

    def __exit__(self, *_: object) -> None:
        for guest in list(self._guests.values()):
            self._drop(guest)
        self._selector.close()

    def wait(self, deadline: float, rest: Callable[[], None]) -> None:
        """Until enough machines are there: as many as may come, or those that are needed and the last call is over."""
        told = self._told
        last_call = 0.0  # when it ends; 0: there are not enough yet
        while len(self._accepted) < max(told.most, told.count) - 1:
            rest()
            now = time.monotonic()
            if len(self._accepted) < told.count - 1:
                last_call = 0.0
            elif not last_call:
                last_call = now + told.last_call
            elif now > last_call:
                return
            if not last_call and now > deadline:
                came = f"{len(self._accepted) + 1} of {told.count} machines came to {told.address}:{told.port}"
                raise Refusal(f"{came} within {span(PATIENCE_S)}", EX_TEMPFAIL, cause="launch.nodes")
            for key, _ in self._selector.select(POLL_S):
                if key.fileobj is self._own:
                    self._welcome()
                elif key.fileobj in self._guests and len(self._accepted) < max(told.most, told.count) - 1:
                    self._hear(self._guests[key.fileobj])
            for guest in [one for one in self._guests.values() if not one.accepted and now > one.until]:
                self._drop(guest)

    def _welcome(self) -> None:
        for _ in range(_MOST_STRANGERS):
            try:
                way, address = self._own.accept()
            except OSError:  # nobody left, or one that is gone already
                return
            way.setblocking(False)
            guest = self._guests[way] = _Guest(way, str(address[0]))
            self._selector.register(way, selectors.EVENT_READ)
            strangers = [one for one in self._guests.values() if not one.accepted]
            if len(strangers) > _MOST_STRANGERS:
                self._drop(_least_wanted(strangers))
            self._hear(guest)  # what it said is often there already

    def _hear(self, guest: _Guest) -> None:
        try:
            data = guest.way.recv(LONGEST)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        guest.data += data
        # Gone (stopped and started again: it comes a second time), too long, or with nothing more to say, and talking.
        if not data or guest.accepted or len(guest.data) > LONGEST:
            self._drop(guest)
            return
        line, end, rest = guest.data.partition(b"\n")
        if end:
            guest.data = rest
            self._take(guest, read_line(line))

    def _take(self, guest: _Guest, word: dict[str, Any]) -> None:
        if guest.challenge:
            assert self._secret is not None
            if not self._secret.fits(word.get("proof"), GUEST, guest.hello, guest.challenge):
                self._turn_away(guest, "the secrets differ (STOKER_RDZV_SECRET)", tell=True)
            else:
                self._accept(guest)
            return
        try:
            guest.hello = typed.read_fields(_HELLO, word)
        except ValueError:
            self._turn_away(guest, "", tell=False)  # a port scan, or another program: not worth a line
            return
        told, hello = self._told, guest.hello
        if hello["job"] != told.name or hello["count"] != told.count:
            other = f"another job meets there: {told.count} machines, --rdzv-id {told.name or 'none'}"
            self._turn_away(guest, other, tell=False)
        elif not 1 <= hello["ranks"] <= MOST_RANKS:
            self._turn_away(guest, f"{hello['ranks']} ranks: a machine has 1 to {MOST_RANKS}", tell=True)
        elif self._secret is None and "nonce" in hello:
            alone = "it has a secret (STOKER_RDZV_SECRET) and the machine at the endpoint has none"
            self._turn_away(guest, alone, tell=True)
        elif self._secret is not None and "nonce" not in hello:
            without = "the machine at the endpoint has a secret (STOKER_RDZV_SECRET), and it has none"
            self._turn_away(guest, without, tell=True)
        elif self._secret is not None:
            guest.challenge = self._secret.nonce()
            self._send(guest, {"challenge": guest.challenge})
        else:
            self._accept(guest)

    def _accept(self, guest: _Guest) -> None:
        guest.accepted = True
        self._accepted.append(guest)

    def _turn_away(self, guest: _Guest, why: str, tell: bool) -> None:
        if why:
            self._send(guest, {"refused": why})
        line = f"stoker: machine {guest.address} was turned away: {why}"
        if tell and line not in self._lines and len(self._lines) < _MOST_LINES:
            self._lines.add(line)
            self._say(line)
        self._drop(guest)

    def _send(self, guest: _Guest, word: dict[str, Any]) -> bool:
        """A line fits into any socket's buffer: who has no room for it has not read for long."""
        try:
            data = json.dumps(word).encode() + b"\n"
            return guest.way.send(data) == len(data)
        except OSError:
            return False

    def _drop(self, guest: _Guest) -> None:
        if self._guests.pop(guest.way, None) is None:
            return
        if guest in self._accepted:
            self._accepted.remove(guest)
        self._selector.unregister(guest.way)
        guest.way.close()

    def number(self, port: int) -> Nodes:
        """Tells everybody. The first of them has the numbers after ours."""
        told = self._told
        world = self._ranks + sum(guest.hello["ranks"] for guest in self._accepted)
        first, nodes = self._ranks, 1 + len(self._accepted)
        for rank, guest in enumerate(self._accepted, 1):
            word: dict[str, Any] = {"rank": rank, "first": first, "world": world, "port": port, "nodes": nodes}
            if self._secret is not None:
                word["proof"] = self._secret.proof(HOST, {**guest.hello, **word}, guest.challenge)
            if not self._send(guest, word):
                left = f"machine {guest.address} left {told.address}:{told.port} while the ranks were numbered"
                raise Refusal(f"{left}; start all of them again", EX_TEMPFAIL, cause="launch.nodes")
            first += guest.hello["ranks"]
        return Nodes(nodes, 0, 0, world, told.address, port)


# ---- the machine that comes: says who it is, and gets its number ----


class Asking:
    def __init__(self, told: Meeting, ranks: int, secret: Secret | None, rest: Callable[[], None]) -> None:
        self._told, self._ranks, self._secret, self._rest = told, ranks, secret, rest

    def ask(self, where: Any, family: int, deadline: float, say: Callable[[str], None]) -> Nodes:
        told, said = self._told, False
        while True:
            problem = "it closes the connection"
            with socket.socket(family, socket.SOCK_STREAM) as way:
                way.settimeout(2.0)
                try:
                    way.connect(where)
                    self._refuse_others(way)
                    found = self._talk(way, deadline)
                except OSError as refused:
                    found, problem = None, refused.strerror or str(refused)
                except ValueError as wrong:
                    found, problem = None, f"what answers there is not a Stoker: {wrong}"
            if found is not None:
                return found
            if not said:
                said = True
                nobody = f"no answer from {told.address}:{told.port} yet ({problem})"
                say(f"stoker: {nobody}; trying for up to {span(PATIENCE_S)}")
            if time.monotonic() > deadline:
                raise _refusal(self._told, f"no answer within {span(PATIENCE_S)}: {problem}", EX_TEMPFAIL)
            until = time.monotonic() + AGAIN_S
            while time.monotonic() < until:
                self._rest()

    def _refuse_others(self, way: socket.socket) -> None:
        """On this machine anybody may listen there before the launcher that would be number 0 does, and number us."""
        others = sorted(uid for uid in listeners.answering_users(way) if not owners.is_trusted(uid, os.curdir))
        if others:
            line = f"port {self._told.port} is in use by {owners.user_name(others[0])}, whom this launch does not join"
            raise _refusal(self._told, f"{line}: choose another port")

    def _talk(self, way: socket.socket, deadline: float) -> Nodes | None:
        """None: the other side is gone. It may come back, or another one in its place."""
        told = self._told
        hello: dict[str, Any] = {"job": told.name, "count": told.count, "ranks": self._ranks}
        if self._secret is not None:
            hello["nonce"] = self._secret.nonce()
        _send(way, hello)
        word = self._listen(way, deadline)
        challenge = ""
        if self._secret is not None and word:
            challenge = word["challenge"] if isinstance(word.get("challenge"), str) else ""
            if not challenge:
                alone = "this machine has a secret (STOKER_RDZV_SECRET) and the one at the endpoint has none"
                raise _refusal(told, f"{alone}: give all the same, or none")
            _send(way, {"proof": self._secret.proof(GUEST, hello, challenge)})
            word = self._listen(way, deadline)
        if not word:
            return None
        if self._secret is None and "challenge" in word:
            line = "the machine at the endpoint has a secret (STOKER_RDZV_SECRET), and this one has none"
            raise _refusal(self._told, line)
        answer = self._checked(word)
        if self._secret is not None and not self._secret.fits(word.get("proof"), HOST, {**hello, **answer}, challenge):
            unknown = "the machine at the endpoint does not know the secret (STOKER_RDZV_SECRET)"
            raise _refusal(told, f"{unknown}: the secrets differ, or it is a stranger")
        return Nodes(answer["nodes"], answer["rank"], answer["first"], answer["world"], told.address, answer["port"])

    def _listen(self, way: socket.socket, deadline: float) -> dict[str, Any]:
        line = _wait_line(way, deadline, self._rest)
        if not line:
            return {}
        word = read_line(line)
        if not word:
            raise ValueError(f"it says {line[:60]!a}")
        if "refused" in word:
            raise _refusal(self._told, printable(str(word["refused"]), 500))
        return word

    def _checked(self, word: dict[str, Any]) -> dict[str, Any]:
        told = self._told
        try:
            answer = typed.read_fields(_ANSWER, word)
        except ValueError as problem:
            raise _refusal(self._told, f"its answer can't be used: {problem}") from None
        most = max(told.most, told.count)
        fits = (
            told.count <= answer["nodes"] <= most
            and 1 <= answer["rank"] < answer["nodes"]
            and answer["first"] >= 1
            and answer["first"] + self._ranks <= answer["world"] <= answer["nodes"] * MOST_RANKS
            and 1 <= answer["port"] < 1 << 16
        )
        if not fits:
            wanted = f"{self._ranks} rank(s) of {told.count} to {most} machines"
            raise _refusal(told, f"its answer can't be used: {json.dumps(answer)}, for {wanted}")
        return answer


def _wait_line(way: socket.socket, deadline: float, rest: Callable[[], None]) -> bytes:
    """In pieces: signals and pings get their turn for minutes. Empty: the other side, or the time, is gone."""
    way.settimeout(POLL_S)
    data = b""
    while b"\n" not in data and time.monotonic() < deadline:
        rest()
        try:
            more = way.recv(LONGEST)
        except TimeoutError:
            continue
        except OSError:
            return b""
        data += more
        if len(data) > LONGEST:
            raise ValueError(f"it says {data[:60]!a}")
        if not more:
            return b""
    return data.partition(b"\n")[0]


def read_line(line: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        found = parse_json(line)
        if isinstance(found, dict):
            return found
    return {}


def _send(way: socket.socket, word: dict[str, Any]) -> None:
    way.sendall(json.dumps(word).encode() + b"\n")


# ---- the secret that machines may share: who does not know it gets no number, and hands out none ----
#
# Each side sends a fresh random number and proves that it knows the secret by an HMAC over both numbers and all that was
# said. A proof that is overheard is worth nothing at any other meeting. The secret itself never travels; only a weak one
# could be guessed from what does.

_SHORTEST_SECRET = 16
_LONGEST_SECRET = 4096


class Secret:
    def __init__(self, key: bytes) -> None:
        self._key = key

    def nonce(self) -> str:
        return secrets.token_hex(16)

    def proof(self, side: str, said: Mapping[str, Any], challenge: str) -> str:
        """`side`: whose proof, so that none can be sent back as one's own. `said`: all that both must agree on."""
        text = json.dumps(["stoker-rdzv-1", side, challenge, dict(said)], sort_keys=True, separators=(",", ":"))
        return hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()

    def fits(self, proof: Any, side: str, said: Mapping[str, Any], challenge: str) -> bool:
        right = self.proof(side, said, challenge)
        return isinstance(proof, str) and proof.isascii() and hmac.compare_digest(proof, right)


def find_secret(environment: Mapping[str, str]) -> Secret | None:
    """From the variable, or the file that the other variable names. Never from the command line: others can read that."""
    given, path = environment.get(RDZV_SECRET, ""), environment.get(RDZV_SECRET_FILE, "")
    if given and path:
        raise _bad_secret(f"{RDZV_SECRET} and {RDZV_SECRET_FILE} are both set: give one of them")
    where = RDZV_SECRET_FILE if path else RDZV_SECRET
    key = (_read_secret(path) if path else given).strip()
    if not key:
        return None
    if len(key) < _SHORTEST_SECRET:
        better = f"give {_SHORTEST_SECRET} or more, as from `openssl rand -hex 32`"
        raise _bad_secret(f"{where}: {counted(len(key), 'character')} can be guessed; {better}")
    return Secret(key.encode("utf-8", "surrogateescape"))


def _bad_secret(line: str) -> Refusal:
    return Refusal(line, EX_CONFIG, cause="launch.nodes")


def _read_secret(path: str) -> str:
    path = os.path.expanduser(path)
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            about = os.fstat(file.fileno())
            data = file.read(_LONGEST_SECRET)
    except OSError as problem:
        raise _bad_secret(f"{RDZV_SECRET_FILE}={path} can't be read: {problem.strerror}") from problem
    if about.st_uid not in (0, os.getuid()) or about.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise _bad_secret(f"{RDZV_SECRET_FILE}={path}: others can read it, or it is not yours; `chmod 600 {path}`")
    if not data.strip():
        raise _bad_secret(f"{RDZV_SECRET_FILE}={path} is empty")
    return data.decode("utf-8", "surrogateescape")
