"""A machine that comes to where others meet: says who it is, and gets its number. The other side is in rendezvous.py,
with the protocol.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable
from typing import Any

from stoker.contract import typed
from stoker.contract.names import EX_TEMPFAIL, EX_UNAVAILABLE, Refusal
from stoker.contract.quantities import span
from stoker.contract.untrusted import parse_json, printable
from stoker.control.launch.nodes import Meeting, Nodes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stoker.control.launch.rdzv_secret import Secret

PATIENCE_S = 600.0  # torchrun's
AGAIN_S = 0.5
POLL_S = 0.1
LONGEST = 4096  # bytes of a line
MOST_RANKS = 1 << 16  # of one machine; more processes than any kernel starts
GUEST, HOST = "guest", "host"  # whose proof
_ANSWER = {"rank": "int", "first": "int", "world": "int", "port": "int", "nodes": "int"}


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
                    found = self._talk(way, deadline)
                except OSError as refused:
                    found, problem = None, refused.strerror or str(refused)
                except ValueError as wrong:
                    found, problem = None, f"what answers there is not a Stoker: {wrong}"
            if found is not None:
                return found
            if not said:
                said = True
                say(
                    f"stoker: nobody answers at {told.address}:{told.port} yet ({problem}); trying for up to"
                    f" {span(PATIENCE_S)}"
                )
            if time.monotonic() > deadline:
                raise self._refusal(f"nobody answered within {span(PATIENCE_S)}: {problem}", EX_TEMPFAIL)
            until = time.monotonic() + AGAIN_S
            while time.monotonic() < until:
                self._rest()

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
                raise self._refusal(
                    "this machine has a secret (STOKER_RDZV_SECRET) and the one at the endpoint has none: give all the"
                    " same, or none"
                )
            _send(way, {"proof": self._secret.proof(GUEST, hello, challenge)})
            word = self._listen(way, deadline)
        if not word:
            return None
        if self._secret is None and "challenge" in word:
            raise self._refusal("the machine at the endpoint has a secret (STOKER_RDZV_SECRET), and this one has none")
        answer = self._checked(word)
        if self._secret is not None and not self._secret.fits(word.get("proof"), HOST, {**hello, **answer}, challenge):
            raise self._refusal(
                "the machine at the endpoint does not know the secret (STOKER_RDZV_SECRET): the secrets differ, or it"
                " is a stranger"
            )
        return Nodes(answer["nodes"], answer["rank"], answer["first"], answer["world"], told.address, answer["port"])

    def _listen(self, way: socket.socket, deadline: float) -> dict[str, Any]:
        line = _wait_line(way, deadline, self._rest)
        if not line:
            return {}
        word = read_line(line)
        if not word:
            raise ValueError(f"it says {line[:60]!a}")
        if "refused" in word:
            raise self._refusal(printable(str(word["refused"]), 500))
        return word

    def _checked(self, word: dict[str, Any]) -> dict[str, Any]:
        told = self._told
        try:
            answer = typed.read_fields(_ANSWER, word)
        except ValueError as problem:
            raise self._refusal(f"its answer can't be used: {problem}") from None
        most = max(told.most, told.count)
        fits = (
            told.count <= answer["nodes"] <= most
            and 1 <= answer["rank"] < answer["nodes"]
            and answer["first"] >= 1
            and answer["first"] + self._ranks <= answer["world"] <= answer["nodes"] * MOST_RANKS
            and 1 <= answer["port"] < 1 << 16
        )
        if not fits:
            raise self._refusal(
                f"its answer can't be used: {json.dumps(answer)}, for {self._ranks} rank(s) of {told.count} to {most}"
                " machines"
            )
        return answer

    def _refusal(self, why: str, code: int = EX_UNAVAILABLE) -> Refusal:
        return Refusal(f"--rdzv-endpoint {self._told.address}:{self._told.port}: {why}", code, cause="launch.nodes")


def _wait_line(way: socket.socket, deadline: float, rest: Callable[[], None]) -> bytes:
    """The others may come minutes later: in pieces, so that signals and pings get their turn. Empty: the other side is
    gone, or the time is over.
    """
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
