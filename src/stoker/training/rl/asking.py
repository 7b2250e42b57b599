"""A question to a server of answers. It may be broken, or somebody else who took its port: what it sends is bounded in bytes and
in time, and on this machine no other user is asked: a question has the key, and prompts.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from stoker.contract import listeners, owners
from stoker.contract.quantities import span
from stoker.contract.untrusted import printable

_PAUSE_S = (0.1, 2.0)  # between two tries: at first, and at most


class NoAnswer(Exception):
    """A line: why there is none. Another try may get one."""


class TooLong(Exception):
    """A line: the answer has more bytes than any that was asked for."""


class ServerFailed(Exception):
    """A line: the server refused, answered nonsense, or did not answer for too long."""


class Asking:
    """Connections that are open can be ended from another thread."""

    def __init__(self) -> None:
        self._open: set[socket.socket] = set()

    def post(
        self, address: str, path: str, data: bytes | None, headers: Mapping[str, str], *, seconds: float, most: int
    ) -> tuple[int, bytes]:
        """(status, body). `seconds`: for each word of the server, and twice that for all of them; `most`: bytes of the body.
        No `data`: it is only looked at (GET).
        """
        connection = http.client.HTTPConnection(address, timeout=seconds)
        over = threading.Event()
        try:
            connection.sock = own = _connected(connection.host, connection.port, seconds)
            self._open.add(own)
            timer = threading.Timer(2 * seconds, _end, (own, over))
            timer.daemon = True
            timer.start()
            try:
                connection.request("GET" if data is None else "POST", path, data, dict(headers))
                answer = connection.getresponse()
                body = answer.read(most + 1)
            finally:
                timer.cancel()
                self._open.discard(own)
        except (OSError, http.client.HTTPException) as problem:
            late = f"no complete answer within {span(2 * seconds)}" if over.is_set() else ""
            raise NoAnswer(late or str(problem) or type(problem).__name__) from problem
        finally:
            connection.close()
        if len(body) > most:
            raise TooLong(f"its answer has more than {most} bytes")
        if over.is_set() or answer.length:
            raise NoAnswer(f"no complete answer{f' within {span(2 * seconds)}' if over.is_set() else ''}")
        return answer.status, body

    def close(self) -> None:
        """Whoever waits for an answer stops waiting."""
        for one in list(self._open):
            _end(one)


class Patient:
    """Asks until there is an answer: a server may be full, or being replaced. `patience_s`: for each, and until then."""

    def __init__(self, key: str, patience_s: float, most: int) -> None:
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        self._patience_s, self._most, self._asking = patience_s, most, Asking()
        self._over = threading.Event()

    def close(self) -> None:
        """Whoever waits for an answer stops waiting."""
        self._over.set()
        self._asking.close()

    def waits(self, seconds: float) -> bool:
        """False: it is over."""
        return not self._over.wait(seconds)

    def __call__(
        self,
        address: str,
        path: str,
        body: Mapping[str, Any] | None,
        is_fine: Callable[[int, str], bool] = lambda status, line: False,
        waiting: Callable[[], None] = lambda: None,
    ) -> bytes | None:
        """None: a refusal that `is_fine`, by its status and line. No `body`: GET. `waiting` is called before each new try."""
        data = None if body is None else json.dumps(body).encode()
        until, pause = time.monotonic() + self._patience_s, _PAUSE_S[0]
        while True:
            status, text = self._exchange(address, path, data)
            if status == 200:
                return text
            line = printable(_message(text), 300)
            if is_fine(status, line):
                return None
            if 400 <= status < 500 and status != 429:
                raise ServerFailed(f"the server at {address} refused {path} with status {status}: {line}")
            if time.monotonic() > until:
                gone = f"the server at {address} did not answer {path} for {span(self._patience_s)}"
                raise ServerFailed(f"{gone}: {f'status {status}: ' if status else ''}{line}")
            waiting()
            if self._over.wait(pause):
                raise ServerFailed(f"the server at {address} is no longer asked: the run ends")
            pause = min(2 * pause, _PAUSE_S[1])

    def _exchange(self, address: str, path: str, data: bytes | None) -> tuple[int, bytes]:
        """Status 0: there was no answer, and the text says why."""
        try:
            return self._asking.post(address, path, data, self._headers, seconds=self._patience_s, most=self._most)
        except NoAnswer as problem:
            return 0, str(problem).encode()
        except TooLong as problem:
            raise ServerFailed(
                f"the server at {address} sent an answer to {path} that can't be read: {problem}"
            ) from problem


def _message(text: bytes) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return text[:300].decode("utf-8", "replace")


def _end(one: socket.socket, over: threading.Event | None = None) -> None:
    if over is not None:
        over.set()
    try:
        one.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it has just ended by itself


def _connected(host: str, port: int, seconds: float) -> socket.socket:
    """At the first of its addresses where no other user is: `localhost` may be ::1 and 127.0.0.1, and a server has one of them."""
    problems: list[OSError | NoAnswer] = []
    for family, kind, protocol, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        own = socket.socket(family, kind, protocol)
        try:
            own.settimeout(seconds)
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if ipaddress.ip_address(str(where[0]).partition("%")[0]).is_loopback:
                # Before anything is sent: who takes no connections would be waited for.
                _refuse_others(listeners.listening_users(str(where[0]), port), port)
            own.connect(where)
            _refuse_others(listeners.answering_users(own), port)
        except (OSError, NoAnswer) as refused:
            own.close()
            problems.append(refused)
        except BaseException:
            own.close()
            raise
        else:
            return own
    raise next((one for one in problems if isinstance(one, NoAnswer)), problems[0])


def _refuse_others(uids: Iterable[int], port: int) -> None:
    others = sorted(uid for uid in uids if not owners.is_trusted(uid, os.curdir))
    if others:
        raise NoAnswer(f"port {port} is in use by {owners.user_name(others[0])}")
