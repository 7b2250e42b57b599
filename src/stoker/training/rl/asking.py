"""HTTP requests to the servers of completions, with time limits. A loopback port that another user holds gets nothing."""

from __future__ import annotations

import errno
import http.client
import ipaddress
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from stoker.contract import listeners, safe_io
from stoker.contract.text import escape
from stoker.contract.units import format_duration
from stoker.training.rl.waiting import ServerWait
from stoker.training.serve.api import OTHER_MODEL

_PAUSE_S = (0.1, 2.0)  # between two tries: at first, and at most
CONNECT_S = 3.0  # for a connection: an address that nobody answers at is reported, and tried again


class NoAnswer(Exception):
    """A line: why there is none. Another try may get one."""


class Unreachable(NoAnswer):
    """A line: why there is no connection to the server."""


class ServerFailed(Exception):
    """A line: the server refused, answered nonsense, or did not answer for too long."""


class Asking:
    """Connections that are open can be ended from another thread."""

    def __init__(self) -> None:
        self._open: set[socket.socket] = set()
        self._is_closed = False

    def post(
        self, address: str, path: str, data: bytes | None, headers: Mapping[str, str], *, seconds: float
    ) -> tuple[int, bytes]:
        """Return status and body. `seconds`: for each piece that the server sends, and twice that for all of them. Without
        `data` it is a GET. Raises NoAnswer.
        """
        connection = http.client.HTTPConnection(address, timeout=seconds)
        over, late = threading.Event(), f"no complete answer within {format_duration(2 * seconds)}"
        try:
            connection.sock = own = self._connected(connection.host, connection.port, seconds)
            timer = threading.Timer(2 * seconds, _end, (own, over))
            timer.daemon = True
            timer.start()
            try:
                connection.request("GET" if data is None else "POST", path, data, dict(headers))
                answer = connection.getresponse()
                body = answer.read()
            finally:
                timer.cancel()
                self._open.discard(own)
        except (OSError, http.client.HTTPException) as problem:
            if over.is_set():
                raise NoAnswer(late) from problem
            is_cut = isinstance(problem, http.client.IncompleteRead)
            raise NoAnswer("no complete answer" if is_cut else _reason(problem)) from problem
        finally:
            connection.close()
        if over.is_set():
            raise NoAnswer(late)
        return answer.status, body

    def connect(self, address: str) -> None:
        """Connect, and close the connection. Raises Unreachable."""
        connection = http.client.HTTPConnection(address)
        own = self._connected(connection.host, connection.port, CONNECT_S)
        self._open.discard(own)
        own.close()

    def close(self) -> None:
        """Whoever waits for an answer or a connection stops waiting, and nobody begins to."""
        self._is_closed = True
        for one in list(self._open):
            _end(one)

    def _connected(self, host: str, port: int, seconds: float) -> socket.socket:
        """Connect to the first of its addresses where no other user is: `localhost` may be ::1 and 127.0.0.1, and a server
        has one of them. Raises Unreachable. The socket is in `_open` then, and while it connects.
        """
        problems: list[OSError | NoAnswer] = []
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as problem:
            raise Unreachable(_reason(problem)) from problem
        for family, kind, protocol, _, where in found:
            own = socket.socket(family, kind, protocol)
            self._open.add(own)
            try:
                if self._is_closed:
                    raise Unreachable("the run ends")
                own.settimeout(min(seconds, CONNECT_S))
                own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if ipaddress.ip_address(str(where[0]).partition("%")[0]).is_loopback:
                    # Before anything is sent: who takes no connections would be waited for.
                    _refuse_others(listeners.find_listening_users(str(where[0]), port), port)
                own.connect(where)
                _refuse_others(listeners.find_answering_users(own), port)
                own.settimeout(seconds)
            except (OSError, NoAnswer) as refused:
                self._open.discard(own)
                own.close()
                problems.append(refused)
            except BaseException:
                self._open.discard(own)
                own.close()
                raise
            else:
                return own
        first = next((one for one in problems if isinstance(one, NoAnswer)), problems[0])
        raise Unreachable(_reason(first)) from first


class Patient:
    """Asks until there is an answer: a server may be full, or being replaced. `patience_s`: for each, and until then. `wait`:
    hears of servers that can't be used.
    """

    def __init__(self, key: str, patience_s: float, wait: ServerWait | None = None) -> None:
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        self.patience_s, self._asking = patience_s, Asking()
        self._wait = wait or ServerWait()
        self._over = threading.Event()

    def close(self) -> None:
        """Whoever waits for an answer stops waiting."""
        self._over.set()
        self._asking.close()

    def probe(self, address: str) -> None:
        """Report a server that takes no connection: a request that is under way does not notice that."""
        began = time.monotonic()
        try:
            self._asking.connect(address)
        except Unreachable as problem:
            if not self._over.is_set():
                self._wait.failed(address, began, f"can't be reached: {problem}", self.patience_s, is_probe=True)
        else:
            self._wait.answered(address, is_probe=True)

    def waits(self, seconds: float) -> bool:
        """False: it is over."""
        return not self._over.wait(seconds)

    def __call__(
        self,
        address: str,
        path: str,
        body: Mapping[str, Any] | None,
        is_fine: Callable[[int, str], bool] = lambda status, line: False,
    ) -> bytes | None:
        """None: a refusal that `is_fine`, by its status and line. No `body`: GET."""
        data = None if body is None else json.dumps(body).encode()
        until, pause = time.monotonic() + self.patience_s, _PAUSE_S[0]
        while True:
            status, text, since = self._exchange(address, path, data)
            if 0 < status < 500:
                self._wait.answered(address)
            if status == 200:
                return text
            message, code = _error(text)
            line = escape(message, 300)
            if is_fine(status, line):
                return None
            if code == OTHER_MODEL:
                raise ServerFailed(
                    f"the server at {address} serves another model than the trainers (model.load): {line}"
                )
            if 400 <= status < 500 and status != 429:
                raise ServerFailed(f"the server at {address} refused {path} with status {status}: {line}")
            if time.monotonic() > until:
                gone = f"the server at {address} did not answer {path} for {format_duration(self.patience_s)}"
                raise ServerFailed(f"{gone}: {f'status {status}: ' if status else ''}{line}")
            if self._over.is_set():
                raise ServerFailed(f"the server at {address} is no longer asked: the run ends")
            if status != 429:
                problem = line if status == 0 else f"has status {status}: {line}"
                self._wait.failed(address, since, problem, self.patience_s)
            if self._over.wait(pause):
                raise ServerFailed(f"the server at {address} is no longer asked: the run ends")
            pause = min(2 * pause, _PAUSE_S[1])

    def _exchange(self, address: str, path: str, data: bytes | None) -> tuple[int, bytes, float]:
        """Return status, body, and since when the server is known to be of no use. Status 0: there was no answer, and the body
        says why.
        """
        began = time.monotonic()
        try:
            status, text = self._asking.post(address, path, data, self._headers, seconds=self.patience_s)
            return status, text, time.monotonic()
        except Unreachable as problem:
            return 0, f"can't be reached: {problem}".encode(), began
        except NoAnswer as problem:
            return 0, f"sent no answer: {problem}".encode(), time.monotonic()


def _error(text: bytes) -> tuple[str, str]:
    """Return the message and the code of an error's body."""
    try:
        error = json.loads(text)["error"]
        return str(error["message"]), str(error.get("code") or "")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return text[:300].decode("utf-8", "replace"), ""


def _end(one: socket.socket, over: threading.Event | None = None) -> None:
    if over is not None:
        over.set()
    try:
        one.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it has just ended by itself


def _reason(problem: Exception) -> str:
    """Return the system's own reason: "Connection refused"."""
    if isinstance(problem, TimeoutError) and not problem.strerror:
        return os.strerror(errno.ETIMEDOUT)
    return (isinstance(problem, OSError) and problem.strerror) or str(problem) or type(problem).__name__


def _refuse_others(uids: Iterable[int], port: int) -> None:
    others = sorted(uid for uid in uids if not safe_io.is_trusted(uid, os.curdir))
    if others:
        raise NoAnswer(f"port {port} is in use by {safe_io.user_name(others[0])}")
