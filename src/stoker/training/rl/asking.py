"""A question to a server of answers. It may be broken, or somebody else who took its port: what it sends is bounded in bytes and
in time, and on this machine no other user is asked: a question has the key, and prompts.
"""

from __future__ import annotations

import http.client
import os
import socket
import threading
from collections.abc import Mapping

from stoker.contract import listeners, owners
from stoker.contract.quantities import span


class NoAnswer(Exception):
    """A line: why there is none. Another try may get one."""


class TooLong(Exception):
    """A line: the answer has more bytes than any that was asked for."""


class Asking:
    """Connections that are open can be ended from another thread."""

    def __init__(self) -> None:
        self._open: set[socket.socket] = set()

    def post(
        self, address: str, path: str, data: bytes, headers: Mapping[str, str], *, seconds: float, most: int
    ) -> tuple[int, bytes]:
        """(status, body). `seconds`: for each word of the server, and twice that for all of them; `most`: bytes of the body."""
        connection = http.client.HTTPConnection(address, timeout=seconds)
        over = threading.Event()
        try:
            connection.connect()
            own = connection.sock
            _refuse_others(own)
            self._open.add(own)
            timer = threading.Timer(2 * seconds, _end, (own, over))
            timer.daemon = True
            timer.start()
            try:
                connection.request("POST", path, data, dict(headers))
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


def _end(one: socket.socket, over: threading.Event | None = None) -> None:
    if over is not None:
        over.set()
    try:
        one.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it has just ended by itself


def _refuse_others(connected: socket.socket) -> None:
    others = sorted(uid for uid in listeners.answering_users(connected) if not owners.is_trusted(uid, os.curdir))
    if others:
        raise NoAnswer(f"port {connected.getpeername()[1]} is in use by {owners.user_name(others[0])}")
